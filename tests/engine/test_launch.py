"""Bad input to a tool is one sentence and exit status 2."""

import errno

import pytest

from tlalign_mm.engine.launch import config_parser, load_config, run_tool


def parse(*arguments: str):
    return config_parser("A tool.").parse_args(list(arguments))


def test_the_command_line_wins_over_the_config(tmp_path) -> None:
    config = tmp_path / "run.py"
    config.write_text("train_cfg = dict(max_epochs=3)\n")
    cfg = load_config(parse(str(config), "--cfg-options", "train_cfg.max_epochs=5"))
    assert cfg.train_cfg.max_epochs == 5
    assert cfg.work_dir == "work_dirs/run"
    assert load_config(parse(str(config), "--work-dir", "elsewhere")).work_dir == "elsewhere"


def test_a_missing_config_or_checkpoint_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="Config nowhere.py does not exist"):
        load_config(parse("nowhere.py"))
    config = tmp_path / "run.py"
    config.write_text("load_from = 'lost.pth'\n")
    with pytest.raises(FileNotFoundError, match="Checkpoint lost.pth does not exist"):
        load_config(parse(str(config)))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (FileNotFoundError("Config x does not exist; name another."), "Config x does not exist"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "No space left on device; mend that (space, permission or path), then run",
        ),
        (KeyboardInterrupt(), "Interrupted; to continue, run the same command again."),
    ],
)
def test_bad_input_ends_with_one_line_and_status_2(error, sentence, capsys) -> None:
    def tool() -> None:
        raise error

    with pytest.raises(SystemExit) as stop:
        run_tool(tool)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert sentence in message and message.count("\n") == 1


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    def tool() -> None:
        raise AttributeError("a bug")

    with pytest.raises(AttributeError):
        run_tool(tool)

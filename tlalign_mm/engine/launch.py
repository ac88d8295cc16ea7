"""Start of the command line tools: read a config, apply the command line, report bad input."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from mmengine.config import Config, DictAction


class ToolError(RuntimeError):
    """Ends a tool; the message is one sentence that says what is wrong and how to mend it."""


def config_parser(description: str | None) -> argparse.ArgumentParser:
    """Options that training and testing share; named as in mmsegmentation and mmdetection."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="config file, for example configs/pretrain/….py")
    parser.add_argument("--work-dir", help="where logs and checkpoints go")
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action=DictAction,
        metavar="KEY=VALUE",
        help="settings that replace those of the config, for example train_cfg.max_epochs=3",
    )
    parser.add_argument(
        "--launcher",
        choices=["none", "pytorch", "slurm", "mpi"],
        default="none",
        help="how several processes are started (default: none, one process)",
    )
    # torchrun and torch.distributed.launch pass it; mmengine reads the environment
    parser.add_argument("--local-rank", "--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def load_config(args: argparse.Namespace) -> Config:
    """Read the config file and put the command line on top.

    Raises:
        FileNotFoundError: If the config, or a checkpoint that it loads, does not exist.
    """
    if not Path(args.config).is_file():
        raise FileNotFoundError(
            f"Config {args.config} does not exist; name a file under configs/, seen from here."
        )
    cfg = Config.fromfile(args.config)
    if args.cfg_options:
        cfg.merge_from_dict(args.cfg_options)
    cfg.launcher = args.launcher
    default = Path("work_dirs") / Path(args.config).stem
    cfg.work_dir = args.work_dir or cfg.get("work_dir") or str(default)
    load_from = cfg.get("load_from")
    if load_from and "://" not in load_from and not Path(load_from).is_file():
        raise FileNotFoundError(f"Checkpoint {load_from} does not exist; correct its path.")
    return cfg


def run_tool(main: Callable[[], None], to_continue: str = "run the same command again") -> None:
    """Run a tool; bad input ends it with one sentence and exit status 2, not with a traceback.

    Args:
        main: The tool.
        to_continue: What a user does after an interruption.
    """
    try:
        main()
    except (ValueError, ToolError) as error:
        sys.exit(_fail(error))
    except OSError as error:
        mend = f"; mend that (space, permission or path), then {to_continue}."
        sys.exit(_fail(error if error.errno is None else f"{error}{mend}"))  # ours say it already
    except KeyboardInterrupt:
        sys.exit(_fail(f"Interrupted; to continue, {to_continue}."))


def _fail(message: object) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2

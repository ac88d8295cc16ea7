"""Pretrain a backbone on mixed images.

Example:
    python tools/train.py configs/pretrain/swin-digits_tlalign_1xb32-20e_digits.py --resume
"""

import argparse

from mmengine.runner import Runner

from tlalign_mm.engine.launch import config_parser, load_config, run_tool
from tlalign_mm.engine.safe_loading import add_trust_option, load_safely


def parse_args() -> argparse.Namespace:
    parser = config_parser(__doc__)
    parser.add_argument(
        "--resume", action="store_true", help="continue from the last checkpoint in the work dir"
    )
    parser.add_argument("--amp", action="store_true", help="train in mixed precision")
    add_trust_option(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    load_safely(args.trust)
    cfg = load_config(args)
    cfg.resume = args.resume
    if args.amp:
        cfg.optim_wrapper.type = "AmpOptimWrapper"
        cfg.optim_wrapper.setdefault("loss_scale", "dynamic")
    Runner.from_cfg(cfg).train()


if __name__ == "__main__":
    run_tool(main, to_continue="run the same command with --resume")

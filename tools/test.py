"""Measure the accuracy of a pretrained classifier.

Example:
    python tools/test.py configs/pretrain/swin-digits_tlalign_1xb32-20e_digits.py \
        work_dirs/swin-digits_tlalign_1xb32-20e_digits/epoch_20.pth
"""

import argparse

from mmengine.runner import Runner

from tlalign_mm.engine.launch import config_parser, load_config, run_tool
from tlalign_mm.engine.safe_loading import add_trust_option, load_safely


def parse_args() -> argparse.Namespace:
    parser = config_parser(__doc__)
    parser.add_argument("checkpoint", help="checkpoint of the run (epoch_….pth)")
    add_trust_option(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    load_safely(args.trust)
    args.cfg_options = {**(args.cfg_options or {}), "load_from": args.checkpoint}
    Runner.from_cfg(load_config(args)).test()


if __name__ == "__main__":
    run_tool(main)

# A small Swin on the built-in digits with CutMix and area labels, the baseline of TL-Align.
# Command: python tools/train.py configs/pretrain/swin-digits_cutmix_1xb32-20e_digits.py
# Published number: none, the data set is this project's own.
_base_ = [
    '../_base_/models/swin_digits.py', '../_base_/datasets/digits_imagenet.py',
    '../_base_/schedules/adamw_digits_epoch.py', '../_base_/runtime_pretrain.py'
]
model = dict(target='area')

# A small Swin on the built-in digits with CutMix and token-aligned labels.
# Command: python tools/train.py configs/pretrain/swin-digits_tlalign_1xb32-20e_digits.py
# Published number: none, the data set is this project's own.
_base_ = './swin-digits_cutmix_1xb32-20e_digits.py'
model = dict(target='tl_align')

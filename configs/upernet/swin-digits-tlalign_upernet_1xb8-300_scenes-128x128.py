# UperNet on the small Swin that was pretrained with token-aligned labels.
# Command: python $(MMSEG)/.mim/tools/train.py configs/upernet/<this file>, see the README.
# Published number: none, the data set is this project's own.
_base_ = './swin-digits_upernet_1xb8-300_scenes-128x128.py'
pretrained = 'work_dirs/demo/pretrain_tl_align/backbone.safetensors'
model = dict(
    backbone=dict(init_cfg=dict(_delete_=True, type='Pretrained', checkpoint=pretrained)))

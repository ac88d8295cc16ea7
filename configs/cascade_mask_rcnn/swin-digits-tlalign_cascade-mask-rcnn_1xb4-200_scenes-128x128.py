# Cascade Mask R-CNN on the small Swin that was pretrained with token-aligned labels.
# Command: python $(MMDET)/.mim/tools/train.py configs/cascade_mask_rcnn/<this file>, see the README.
# Published number: none, the data set is this project's own.
_base_ = './swin-digits_cascade-mask-rcnn_1xb4-200_scenes-128x128.py'
pretrained = 'work_dirs/demo/pretrain_tl_align/backbone.safetensors'
model = dict(
    backbone=dict(init_cfg=dict(_delete_=True, type='Pretrained', checkpoint=pretrained)))

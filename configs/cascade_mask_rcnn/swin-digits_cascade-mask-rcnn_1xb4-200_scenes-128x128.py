# Cascade Mask R-CNN on the small Swin from random weights: the control of the pretrained one.
# Command: python $(MMDET)/.mim/tools/train.py configs/cascade_mask_rcnn/<this file>, see the README.
# Published number: none, the data set is this project's own.
_base_ = [
    'mmdet::_base_/models/cascade-mask-rcnn_r50_fpn.py', '../_base_/datasets/scenes_coco.py',
    '../_base_/schedules/adamw_digits_iter.py', '../_base_/runtime_dense.py'
]
default_scope = 'mmdet'
visualizer = dict(type='DetLocalVisualizer', vis_backends=_base_.vis_backends, name='visualizer')
# torchvision stands in for mmcv's compiled ops where they are absent
custom_imports = dict(imports=['tlalign_mm.compat'], allow_failed_imports=False)
roi_channels = 32
strides = [4, 8, 16]  # of the three stages
box_stds = ([0.1, 0.1, 0.2, 0.2], [0.05, 0.05, 0.1, 0.1], [0.033, 0.033, 0.067, 0.067])
model = dict(
    backbone=dict(
        _delete_=True,
        type='tlalign_mm.SwinTransformer',
        embed_dim=32,
        depths=(2, 2, 2),
        num_heads=(2, 4, 8),
        window_size=4,
        patch_size=4,
        drop_path_rate=0.05,
        out_indices=(0, 1, 2),
        init_cfg=dict(type='Xavier', layer='Linear')),
    neck=dict(in_channels=[32, 64, 128], out_channels=roi_channels, num_outs=3),
    rpn_head=dict(
        in_channels=roi_channels,
        feat_channels=roi_channels,
        anchor_generator=dict(scales=[4], strides=strides)),
    roi_head=dict(
        # a digit of 28 to 56 pixels is pooled from the middle level
        bbox_roi_extractor=dict(
            out_channels=roi_channels, featmap_strides=strides, finest_scale=14),
        bbox_head=[
            dict(
                type='Shared2FCBBoxHead',
                in_channels=roi_channels,
                fc_out_channels=128,
                roi_feat_size=7,
                num_classes=10,
                bbox_coder=dict(
                    type='DeltaXYWHBBoxCoder', target_means=[0.0] * 4, target_stds=stds),
                reg_class_agnostic=True,
                loss_cls=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
                loss_bbox=dict(type='SmoothL1Loss', beta=1.0, loss_weight=1.0))
            for stds in box_stds
        ],
        mask_roi_extractor=dict(
            out_channels=roi_channels, featmap_strides=strides, finest_scale=14),
        mask_head=dict(
            num_convs=2,
            in_channels=roi_channels,
            conv_out_channels=roi_channels,
            num_classes=10)),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=200, max_per_img=64),
        rcnn=[
            dict(
                assigner=dict(
                    type='MaxIoUAssigner',
                    pos_iou_thr=threshold,
                    neg_iou_thr=threshold,
                    min_pos_iou=threshold,
                    match_low_quality=False,
                    ignore_iof_thr=-1),
                sampler=dict(
                    type='RandomSampler',
                    num=32,
                    pos_fraction=0.25,
                    neg_pos_ub=-1,
                    add_gt_as_proposals=True),
                mask_size=28,
                pos_weight=-1,
                debug=False) for threshold in (0.5, 0.6, 0.7)
        ]),
    test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=64), rcnn=dict(max_per_img=20)))
train_dataloader = dict(batch_size=4)
max_iters = 200
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=30),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False, begin=30, end=max_iters)
]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
default_hooks = dict(checkpoint=dict(interval=60))  # a third of the run at most is lost
# the heads start from nothing in either run
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'head': dict(lr_mult=3.0)}))

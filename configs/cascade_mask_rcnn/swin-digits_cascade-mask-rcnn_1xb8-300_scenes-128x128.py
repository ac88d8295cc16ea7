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
roi_channels = 64
box_stds = ([0.1, 0.1, 0.2, 0.2], [0.05, 0.05, 0.1, 0.1], [0.033, 0.033, 0.067, 0.067])
model = dict(
    backbone=dict(
        _delete_=True,
        type='tlalign_mm.SwinTransformer',
        embed_dim=32,
        depths=(2, 2, 2, 2),
        num_heads=(1, 2, 4, 8),
        window_size=4,
        patch_size=4,
        drop_path_rate=0.1),
    neck=dict(in_channels=[32, 64, 128, 256], out_channels=roi_channels),
    rpn_head=dict(
        in_channels=roi_channels,
        feat_channels=roi_channels,
        anchor_generator=dict(scales=[4])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=roi_channels),
        bbox_head=[
            dict(
                type='Shared2FCBBoxHead',
                in_channels=roi_channels,
                fc_out_channels=256,
                roi_feat_size=7,
                num_classes=10,
                bbox_coder=dict(
                    type='DeltaXYWHBBoxCoder', target_means=[0.0] * 4, target_stds=stds),
                reg_class_agnostic=True,
                loss_cls=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
                loss_bbox=dict(type='SmoothL1Loss', beta=1.0, loss_weight=1.0))
            for stds in box_stds
        ],
        mask_roi_extractor=dict(out_channels=roi_channels),
        mask_head=dict(
            num_convs=2, in_channels=roi_channels, conv_out_channels=roi_channels,
            num_classes=10)),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=128)),
        rpn_proposal=dict(nms_pre=500, max_per_img=200),
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
                    num=64,
                    pos_fraction=0.25,
                    neg_pos_ub=-1,
                    add_gt_as_proposals=True),
                mask_size=28,
                pos_weight=-1,
                debug=False) for threshold in (0.5, 0.6, 0.7)
        ]),
    test_cfg=dict(rpn=dict(nms_pre=200, max_per_img=100)))

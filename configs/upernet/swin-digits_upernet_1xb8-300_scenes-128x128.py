# UperNet on the small Swin from random weights: the control of the pretrained one.
# Command: python $(MMSEG)/.mim/tools/train.py configs/upernet/<this file>, see the README.
# Published number: none, the data set is this project's own.
_base_ = [
    '../_base_/models/upernet_swin.py', '../_base_/datasets/scenes_ade20k.py',
    '../_base_/schedules/adamw_digits_iter.py', '../_base_/runtime_dense.py'
]
default_scope = 'mmseg'
visualizer = dict(type='SegLocalVisualizer', vis_backends=_base_.vis_backends, name='visualizer')
norm_cfg = dict(type='BN', requires_grad=True)
# nine pixels of ten are ground; unweighted, the short run never gets to tell the digits apart
class_weight = [0.1] + [1.0] * 10
model = dict(
    data_preprocessor=dict(size=(128, 128)),
    backbone=dict(
        arch=None,
        embed_dim=32,
        depths=(2, 2, 2),
        num_heads=(2, 4, 8),
        window_size=4,
        patch_size=4,
        drop_path_rate=0.05,
        out_indices=(0, 1, 2),
        init_cfg=dict(type='Xavier', layer='Linear')),
    decode_head=dict(
        in_channels=[32, 64, 128],
        in_index=[0, 1, 2],
        channels=32,
        num_classes=11,
        norm_cfg=norm_cfg,
        loss_decode=dict(class_weight=class_weight)),
    auxiliary_head=dict(
        in_channels=128,
        channels=32,
        num_classes=11,
        norm_cfg=norm_cfg,
        loss_decode=dict(class_weight=class_weight)))
# the heads start from nothing in either run
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'head': dict(lr_mult=5.0)}))

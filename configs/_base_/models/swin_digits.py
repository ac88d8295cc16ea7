# A small Swin for 40x40 images: token maps of 10, 5 and 3, windows of 4.
model = dict(
    type='tlalign_mm.ImageClassifier',
    num_classes=10,
    label_smoothing=0.1,
    backbone=dict(
        type='tlalign_mm.SwinTransformer',
        embed_dim=32,
        depths=(2, 2, 2),
        num_heads=(2, 4, 8),
        window_size=4,
        patch_size=4,
        drop_path_rate=0.05,
        out_indices=(),
        # the usual 0.02 is far too small for layers this narrow
        init_cfg=dict(type='Xavier', layer='Linear')),
    data_preprocessor=dict(
        type='tlalign_mm.MixDataPreprocessor',
        mixer=dict(type='tlalign_mm.CutMix', alpha=1.0, prob=0.5)))

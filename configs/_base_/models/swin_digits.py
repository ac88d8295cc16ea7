# A small Swin for 32x32 images: token maps of 8, 4, 2 and 1, windows of 4.
model = dict(
    type='tlalign_mm.ImageClassifier',
    num_classes=10,
    label_smoothing=0.1,
    backbone=dict(
        type='tlalign_mm.SwinTransformer',
        embed_dim=32,
        depths=(2, 2, 2, 2),
        num_heads=(1, 2, 4, 8),
        window_size=4,
        patch_size=4,
        drop_path_rate=0.1,
        out_indices=()),
    data_preprocessor=dict(
        type='tlalign_mm.MixDataPreprocessor',
        mixer=dict(type='tlalign_mm.CutMix', alpha=1.0, prob=0.8)))

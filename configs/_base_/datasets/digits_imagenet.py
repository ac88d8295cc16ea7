# Handwritten digits as class folders; `python tools/prepare_digits.py` writes them.
data_root = 'data/digits/imagenet'
train_dataloader = dict(
    batch_size=32,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    drop_last=True,
    dataset=dict(
        type='tlalign_mm.ImageFolder',
        data_root=data_root,
        split='train',
        transform=dict(
            input_size=40,
            is_training=True,
            scale=(0.75, 1.0),
            hflip=0.0,  # a mirrored digit is no digit
            color_jitter=0.0,
            interpolation='bicubic')))
val_dataloader = dict(
    batch_size=120,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='default_collate'),
    dataset=dict(
        type='tlalign_mm.ImageFolder',
        data_root=data_root,
        split='val',
        transform=dict(input_size=40, crop_pct=1.0, interpolation='bicubic')))
val_evaluator = dict(type='tlalign_mm.TopKAccuracy', topk=(1, 5))
test_dataloader = val_dataloader
test_evaluator = val_evaluator

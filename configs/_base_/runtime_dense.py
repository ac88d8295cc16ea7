# Runtime of short dense runs, counted in iterations; mmseg and mmdet configs set their scope.
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=20, log_metric_by_epoch=False),
    param_scheduler=dict(type='ParamSchedulerHook'),
    # two are kept: mmengine deletes the oldest before it writes the next
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=100, max_keep_ckpts=2),
    sampler_seed=dict(type='DistSamplerSeedHook'))
env_cfg = dict(
    cudnn_benchmark=True,
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'))
vis_backends = [dict(type='LocalVisBackend')]
log_processor = dict(type='LogProcessor', window_size=20, by_epoch=False)
log_level = 'INFO'
load_from = None
resume = False
randomness = dict(seed=0)

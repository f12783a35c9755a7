"""A process group of this rank alone: real values, for comparing results."""

import pytest
import torch.distributed as dist


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()

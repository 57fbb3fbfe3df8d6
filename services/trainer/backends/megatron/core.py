"""The parts of megatron-core that the backend needs; only this module imports them.

The import suppresses the warnings of megatron-core, and raises a clear error if megatron-core is missing.

Types are not checked beyond this module, because megatron-core ships none.
"""

from __future__ import annotations

import warnings

from penstock.shared.errors import ConfigError

__all__ = [
    "MLP",
    "GPTModel",
    "IdentityOp",
    "MLPSubmodules",
    "ModuleSpec",
    "P2PCommunicator",
    "PackedSeqParams",
    "ProcessGroupCollection",
    "SelfAttention",
    "SelfAttentionSubmodules",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "get_bias_dropout_add",
    "get_forward_backward_func",
    "mappings",
    "parallel_state",
    "tensor_parallel",
]

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Apex and TransformerEngine, which are not used
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
        from megatron.core.models.gpt import GPTModel
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.tensor_parallel import mappings
        from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.mlp import MLP, MLPSubmodules
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
        from megatron.core.transformer.transformer_config import TransformerConfig
        from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
except ImportError as error:
    raise ConfigError(f"backend 'megatron' needs megatron-core: pip install 'penstock[megatron]' ({error})") from None

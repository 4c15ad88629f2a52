"""Libraries with formats of their own, and others that write safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.corpus.cases import Case, Tensors
from tests.corpus.families.hugging_face import files, model


def sentence_transformer(place: Path) -> None:
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertModel, BertTokenizerFast

    parts, made = place.parent / "parts", model("bert")
    BertModel(made.config).save_pretrained(parts)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123))]
    (parts / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(parts / "vocab.txt")).save_pretrained(parts)
    word = models.Transformer(str(parts), max_seq_length=16)
    pooling = models.Pooling(word.get_word_embedding_dimension())
    SentenceTransformer(modules=[word, pooling, models.Dense(32, 8)], device="cpu").save(str(place))


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4,
    )  # fmt: skip


def unet_loaded(place: Path) -> Tensors:
    from diffusers import UNet2DConditionModel

    return dict(UNet2DConditionModel.from_pretrained(place).state_dict())


def pipeline(place: Path) -> None:
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    small = UNet2DModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    DDPMPipeline(small, DDPMScheduler()).save_pretrained(place)


def pipeline_read(place: Path) -> Tensors:
    from safetensors.torch import load_file

    found = load_file(place / "unet" / "diffusion_pytorch_model.safetensors")
    return {f"unet/{name}": one for name, one in found.items()}


def pipeline_loaded(place: Path) -> Tensors:
    from diffusers import DDPMPipeline

    return dict(DDPMPipeline.from_pretrained(place).unet.state_dict())


def component_read(place: Path) -> Tensors:
    return {name.replace("model/", "diffusion_pytorch_model/", 1): one for name, one in files(place).items()}


def segmentation(place: Path) -> None:
    segmentation_model().save_pretrained(place)


def segmentation_model() -> Any:
    import segmentation_models_pytorch

    return segmentation_models_pytorch.Unet(
        "mobilenet_v2", encoder_weights=None, encoder_depth=3, decoder_channels=(8, 8, 8)
    )


def segmentation_loaded(place: Path) -> Tensors:
    import segmentation_models_pytorch

    return dict(segmentation_models_pytorch.from_pretrained(str(place)).state_dict())


def jax_arrays() -> Any:
    import jax

    keys = jax.random.split(jax.random.key(1), 2)
    return {
        "dense/kernel": jax.random.normal(keys[0], (4, 8)),
        "dense/bias": jax.random.normal(keys[1], (8,)).astype("bfloat16"),
    }


def jax_safetensors(place: Path) -> None:
    from safetensors.flax import save_file

    save_file(jax_arrays(), place / "model.safetensors")


def by_flax(place: Path) -> Tensors:
    import numpy as np
    from safetensors.flax import load_file

    found = load_file(place / "model.safetensors")
    return {
        name: torch.from_numpy(np.asarray(one.astype("float32"))).to(getattr(torch, str(one.dtype)))
        for name, one in found.items()
    }


def flax_read(place: Path) -> Tensors:
    return {f"model/{name}": one for name, one in by_flax(place).items()}


def flax_msgpack(place: Path) -> None:
    from flax import serialization

    (place / "flax_model.msgpack").write_bytes(serialization.to_bytes(jax_arrays()))


def numpy_arrays(place: Path) -> None:
    import numpy as np

    np.savez(place / "weights.npz", **{name.replace("/", "."): np.asarray(one, "f4") for name, one in jax_arrays().items()})


def keras_model() -> Any:
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])


def onnx_model(place: Path) -> None:
    import onnx
    from onnx import helper, numpy_helper

    weight = numpy_helper.from_array(torch.rand(4, 8).numpy(), "weight")
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in (("x", [1, 4]), ("y", [1, 8]))
    ]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "weight"], ["y"])], "g", ends[:1], ends[1:], [weight])
    onnx.save(helper.make_model(graph), str(place / "model.onnx"))


def sklearn_model(place: Path) -> None:
    import joblib
    from sklearn.linear_model import LogisticRegression

    joblib.dump(LogisticRegression().fit([[0.0], [1.0]], [0, 1]), place / "model.joblib")


def gguf_file(place: Path) -> None:
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(str(place / "model.gguf"), "llama")
    writer.add_block_count(1)
    writer.add_tensor("output_norm.weight", np.ones(8, "f4"))
    for part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        part()


def gguf_read(place: Path) -> Tensors:
    from gguf import GGUFReader

    found = GGUFReader(place / "model.gguf").tensors
    return {f"model/{one.name}": torch.from_numpy(one.data.copy()) for one in found}


def quanto(place: Path) -> None:
    from optimum.quanto import QuantizedModelForCausalLM, qint8

    QuantizedModelForCausalLM.quantize(model("llama"), weights=qint8).save_pretrained(place)


def quanto_loaded(place: Path) -> Tensors:
    from optimum.quanto import QuantizedModelForCausalLM

    loaded = QuantizedModelForCausalLM.from_pretrained(str(place))
    return {name: one for name, one in loaded._wrapped.state_dict().items() if isinstance(one, torch.Tensor)}


def torchao(place: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    base = place.parent / "base"
    model("llama", torch.bfloat16).save_pretrained(base)
    how = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(base, quantization_config=how, dtype=torch.bfloat16).save_pretrained(place)


CASES = (
    Case("sentence-transformers", "sentence-transformers", sentence_transformer),
    Case(
        "diffusers-unet", "diffusers", lambda place: unet().save_pretrained(place), component_read, unet_loaded, exported=()
    ),
    Case("diffusers-pipeline", "diffusers", pipeline, pipeline_read, pipeline_loaded, exported=("--as", "diffusers")),
    Case("segmentation-models", "segmentation-models-pytorch", segmentation, files, segmentation_loaded),
    Case("jax-safetensors", "jax", jax_safetensors, flax_read, by_flax),
    Case("flax-msgpack", "flax", flax_msgpack),
    Case("numpy-npz", "numpy", numpy_arrays),
    Case("keras-model", "keras", lambda place: keras_model().save(place / "model.keras")),
    Case("keras-weights", "keras", lambda place: keras_model().save_weights(place / "model.weights.h5")),
    Case("onnx-model", "onnx", onnx_model),
    Case("scikit-learn-joblib", "scikit-learn", sklearn_model),
    Case("gguf-file", "gguf", gguf_file, gguf_read, words=("--as-is",)),
    Case("optimum-quanto", "optimum-quanto", quanto, files, quanto_loaded),
    Case("torchao-int8", "torchao", torchao),
)

"""Packaging; `make install` is the way in, because it sees to a torch that fits the machine first."""

from setuptools import setup

HUGGINGFACE = ["transformers>=5,<6"]

setup(
    name="bert-at-scale",
    version="0.1.0",
    description="BERT pretraining from raw text to task models, under DeepSpeed and Slurm",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=["data_prep", "pretraining", "fine_tuning"],
    install_requires=[
        "torch>=2.10",  # the first with Tensor.grad_dtype; an older one would ignore it without a word
        "deepspeed>=0.19.2,<0.20",  # the first with coalesce_grad_reduction
        "webdataset>=1.0,<2",
        "sentencepiece>=0.2.1,<0.3",
        "tokenizers>=0.22,<1",
        "protobuf>=7.36.1,<8",  # sentencepiece's reader of its own model files needs this one, and does not say so
        "sentencex>=1.0,<2",
        "mwparserfromhell>=0.7,<0.8",
        "numpy>=2,<3",
        "pydantic>=2,<3",
        "safetensors>=0.5,<1",
        "tensorboard>=2.18,<3",
        "tqdm>=4.66,<5",
        "matplotlib>=3.10,<4",
        "pillow>=11,<14",
        "rich>=14,<16",
    ],
    extras_require={
        "huggingface": HUGGINGFACE,
        "test": [
            *HUGGINGFACE,
            "hypothesis>=6,<7",
            "psutil>=6,<8",
            "pytest>=8,<10",
            "pytest-timeout>=2.3,<3",
            "ruff>=0.15",
        ],
    },
)

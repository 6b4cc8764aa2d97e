"""The version of torchLoom; here, so that modules need not import the public package to name it."""

__version__ = "0.1.0"

"""The loaders of an ElasticLoader: processes or threads that load its batches, and how batches come from them."""

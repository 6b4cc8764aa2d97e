"""Integrations with other systems, one module or package each. Nothing else depends on them."""

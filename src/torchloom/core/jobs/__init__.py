"""Jobs that torchLoom starts: submission, placement, and reconciling desired with reported state."""

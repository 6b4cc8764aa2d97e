"""From findings to incidents: policies, responses, hangs and their evidence."""

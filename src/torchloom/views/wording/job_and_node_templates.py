"""Sentences about jobs and nodes: how attempts end, what a job waits for, the room and health of nodes."""

from __future__ import annotations

from collections.abc import Mapping

JOB_AND_NODE_TEMPLATES: Mapping[str, str] = {
    # how attempts and jobs end
    "policy_no_restart": "{reason}; its policy is not to start again",
    "restarts_used_up": "{reason}; restart budget used up ({allowed:#restart})",
    "crash_loop": "{reason}; the same as before, without a step forward",
    "next_attempt_failed": "the next attempt failed too: {reason}",
    "replicas_failed": "{failed} of {count} replicas failed ({first})",
    # jobs and nodes
    "no_agent_on_node": "there is no agent on node {node}",
    "node_unknown": "there is no node {node}",
    "schedule_set": "{is_on:if|loaders are allocated by policy {policy}{objective:?, objective }|"
    "loaders are not allocated: jobs have the numbers that their scripts request}",
    "agents_are_on": "{nodes:if|agents are on: {nodes}|no agent runs on any node}",
    "waits_longer": "{seconds} s more: the last attempt made no step forward",
    "arrives_in": "its arrival in {seconds:delay}",
    "waits_for_job": "{job} to end",
    "waits_for_priority": "{job}, which has a higher priority",
    "waits_for_devices": ("{devices:one|device|devices} {devices} {node:if|of {node}|of a node} ({there})"),
    "waits_for_more_nodes": "{count} nodes, one for each of its groups of devices",
    "waits_for_undrain": "`loom drain --undo {replica}`",
    "waits_for_lighthouse": "its lighthouse",
    "waits_for_room_on": "room for {ranks} on {node}",
    "waits_for_nodes": "{count:one|a node|{count} nodes} with room for {ranks} ({there})",
    "nodes_there": "{nodes:;}{more:?; and | more}",
    "no_agent_there": "there is no agent",
    "span": "{least} to {most}",
    "room_drained": "drained",
    "room_silent": "silent",
    "room_leaving": "leaving",
    "room_processor_failed": "its processor has failed",
    "room_being_checked": "being checked",
    "room_not_fit": "not fit, {why}",
    "room_free": "{free} of {count} free{failed:?, | failed}",
    "room_lacks": "no {devices:one|device|devices} {devices}",
    "room_devices_busy": "{devices:one|device|devices} {devices} {jobs:if|in use by {jobs}|failed}",
    "task_too_large": "{ranks} ranks on a node, and none takes more than {most} ({node})",
    "slower_than_nodes": "{times:.1f} times as slow as the median of {count} nodes with {on}",
    "computes_slowly": "computing: {how}",
    "node_not_fit": "node {node} is not fit: {why}",
    "unfit_gets_no_ranks": "jobs that ask for a check get no ranks there",
    "node_fit_again": "it is fit again",
}

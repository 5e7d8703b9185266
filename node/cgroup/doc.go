// SPDX-License-Identifier: Apache-2.0

// Package cgroup places a sandbox in control groups, limits it and measures it, on cgroup v1 and v2.
//
// Each slot is a directory with two leaves, so that a payload at its limits never starves execd:
//
//	<base>/<tree>/<slot>/execd     our daemon: 256 MiB, 512 processes, twice the cpu
//	<base>/<tree>/<slot>/payload   entry point and commands: the limits the user asked for
//
// Order of calls on the launcher's side:
//
//	cgroup.HoldNamespace()             // first statement of main in every program that calls Create
//	h, _ := cgroup.Detect()
//	h.Prepare(tree)                    // once at start, so that the first Create does not pay for it
//	cgroup.Sweep(h, tree, keep)        // what a killed predecessor left
//	g, _ := h.Create(tree, slot, limits)
//	g.Delegate(mappedRootUID)          // does nothing on v1
//	g.SpawnInit(func(attr *syscall.SysProcAttr) error { …; os.StartProcess(…) })
//	e, _ := g.PayloadEntry(); m, _ := g.Meter()      // their Files go to init as inherited fds
//	…
//	g.Kill(); g.Remove(); h.Leave(tree)
//
// Inside, execd rebuilds the two from the fds with EntryFromFiles and MeterFromFiles (same order of
// files, version from Host.Version). On v1 every thread that forks commands calls Entry.EnterThread
// once; on v2 the commands are cloned with UseCgroupFD and Entry.CgroupFD.
//
// No function here writes a process id to cgroup.procs while a sandbox starts: that write waits for an
// RCU grace period (8 to 20 ms). v1 moves single threads by writing 0 to tasks, v2 clones into the group.
//
// Namespaces. On v1 the sandbox sees /execd and /payload: the launcher's thread makes a namespace while
// it stands in the slot. On v2 a thread cannot stand elsewhere than its process, and mounts with
// nsdelegate (systemd's default) refuse a clone across the border of the caller's namespace, so the
// namespace is rooted one level higher, at the tree, with the launcher itself in the leaf
// <tree>/supervisor. A sandbox sees /<slot>/execd, nothing of the host above. That namespace is made
// once, by a short-lived child (HoldNamespace) that is born in the tree before controllers are enabled.
package cgroup

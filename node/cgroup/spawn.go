// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/thread"
)

// SpawnInit runs start so that the process it starts is born in the execd leaf and in a cgroup
// namespace that hides the host above. start gets attributes to which it adds its own clone flags and
// mappings; it runs on a locked thread of its own and must not hand the starting to another goroutine.
//
//	g.SpawnInit(func(attr *syscall.SysProcAttr) (err error) {
//		attr.Cloneflags |= unix.CLONE_NEWPID
//		p, err = os.StartProcess("/proc/self/exe", argv, &os.ProcAttr{Sys: attr})
//		return err
//	})
func (g *Group) SpawnInit(start func(attr *syscall.SysProcAttr) error) error {
	if g.host.version == None {
		return start(&syscall.SysProcAttr{})
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	_, err := thread.Run(func() (none struct{}, back bool, err error) {
		home, err := os.Open("/proc/thread-self/ns/cgroup")
		if err != nil {
			return none, true, err
		}
		defer home.Close()
		spawn := g.spawnV1
		if g.host.version == V2 {
			spawn = g.spawnV2
		}
		back, err = spawn(home, start)
		return none, back, err
	})
	return err
}

func (g *Group) spawnV1(home *os.File, start func(*syscall.SysProcAttr) error) (back bool, err error) {
	hiers := g.host.hiers
	stand := func(dir func(i int) string) error {
		for i := range hiers {
			if err := write(dir(i), "tasks", "0"); err != nil {
				return err
			}
		}
		return nil
	}
	away := func() error {
		// The namespace is rooted where the thread stands, so: slot, namespace, leaf.
		if err := stand(func(i int) string { return g.dirs[i] }); err != nil {
			return err
		}
		if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
			return fmt.Errorf("unshare cgroup namespace: %w", err)
		}
		if err := stand(func(i int) string {
			if hiers[i].leaves() {
				return filepath.Join(g.dirs[i], execdLeaf)
			}
			return g.dirs[i]
		}); err != nil {
			return err
		}
		return start(&syscall.SysProcAttr{})
	}
	err = away()
	homeErr := unix.Setns(int(home.Fd()), unix.CLONE_NEWCGROUP)
	if homeErr == nil {
		homeErr = stand(func(i int) string { return hiers[i].own })
	}
	return homeErr == nil, err
}

func (g *Group) spawnV2(home *os.File, start func(*syscall.SysProcAttr) error) (back bool, err error) {
	if g.host.namespace == nil {
		return true, errors.New("cgroup: SpawnInit before Prepare")
	}
	leaf, err := os.OpenFile(filepath.Join(g.dirs[0], execdLeaf), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return true, err
	}
	defer leaf.Close()
	if err := unix.Setns(int(g.host.namespace.Fd()), unix.CLONE_NEWCGROUP); err != nil {
		return true, fmt.Errorf("enter the tree's cgroup namespace: %w", err)
	}
	err = start(&syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(leaf.Fd())})
	return unix.Setns(int(home.Fd()), unix.CLONE_NEWCGROUP) == nil, err
}

// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
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
	return onThread(func() (back bool, err error) {
		home, err := os.Open("/proc/thread-self/ns/cgroup")
		if err != nil {
			return true, err
		}
		defer home.Close()
		if g.host.version == V2 {
			return g.spawnV2(home, start)
		}
		return g.spawnV1(home, start)
	})
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

// onThread runs f on a locked thread that is not the process's first one. If f could not bring the
// thread back, the thread is thrown away with its goroutine; the first thread cannot be thrown away
// (Go parks it for ever), and parked in a foreign group it would keep that group busy.
func onThread(f func() (back bool, err error)) error {
	result := make(chan error, 1)
	var run func()
	run = func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// While this goroutine waits it occupies the first thread, so the next gets another.
			inner := make(chan struct{})
			go func() { run(); close(inner) }()
			<-inner
			runtime.UnlockOSThread()
			return
		}
		back, err := f()
		result <- err
		if back {
			runtime.UnlockOSThread()
		}
	}
	go run()
	return <-result
}

// SPDX-License-Identifier: Apache-2.0

package enter

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/control"
	"opensandbox.io/node/isolated"
	"opensandbox.io/node/procmask"
)

// scaffold is where the new root is attached until it becomes the root. Every host has it, and in this mount
// namespace nobody needs what it covers.
const scaffold = "/dev"

// buildRoot makes the tree the sandbox will see and leaves everything else behind. The process has several threads,
// which is fine: they share one mount namespace, root and working directory.
func (s *sandbox) buildRoot() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fail("make mounts private", err)
	}
	root, err := s.files.file(control.FileRoot)
	if err != nil {
		return fail("root", err)
	}
	if err := attach(root, scaffold); err != nil {
		return fail("attach the root", err)
	}
	if err := unix.Fchdir(int(root.Fd())); err != nil {
		return fail("enter the root", err)
	}
	root.Close()
	// From here on every path is relative to the new root, and nothing in it can be a planted link: no program of
	// the sandbox has run yet.
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"bind host directories", s.bindHost},
		{"mount dev", s.mountDev},
		{"mount proc", mountProc},
		{"forbid namespaces", s.forbidNamespaces},
		{"keep a whole proc", s.keepWholeProc},
		{"mount sys", s.mountSys},
		{"mask", func() error { return procmask.Apply("dev/null", "dev/mqueue") }},
		{"pivot", pivot},
	} {
		if err := step.do(); err != nil {
			return fail(step.name, err)
		}
	}
	return nil
}

// attach moves a detached mount to a path.
func attach(tree *os.File, path string) error {
	return unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// bindHost shows trees of the host, with the sandbox's own directories kept on top of them.
func (s *sandbox) bindHost() error {
	type kept struct {
		path string
		tree *os.File
	}
	var own []kept
	for _, path := range s.room.Own {
		fd, err := unix.OpenTree(unix.AT_FDCWD, relative(path), unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			return fmt.Errorf("keep %s: %w", path, err)
		}
		own = append(own, kept{path, os.NewFile(uintptr(fd), path)})
	}
	trees := s.files[control.FileBind]
	if len(trees) != len(s.room.Binds) {
		return fmt.Errorf("%d trees for %d paths", len(trees), len(s.room.Binds))
	}
	for i, path := range s.room.Binds {
		if err := attach(trees[i], relative(path)); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		trees[i].Close()
	}
	for _, k := range own {
		err := attach(k.tree, relative(k.path))
		k.tree.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", k.path, err)
		}
	}
	return nil
}

func relative(path string) string { return "." + "/" + strings.TrimPrefix(path, "/") }

// maxTerminals is more than people open in one sandbox.
const maxTerminals = 256

func (s *sandbox) mountDev() error {
	dev, err := s.files.file(control.FileDev)
	if err != nil {
		return err
	}
	if err := attach(dev, "./dev"); err != nil {
		return err
	}
	dev.Close()
	// The number of terminals is one budget of the whole host.
	options := "newinstance,ptmxmode=0666,mode=0620,max=" + strconv.Itoa(maxTerminals)
	if !s.room.OneUser {
		options += ",gid=5" // tty, as everywhere; with one user there is no second group
	}
	if err := unix.Mount("devpts", "./dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, options); err != nil {
		return fmt.Errorf("devpts: %w", err)
	}
	// sandboxd sets the size that is asked for; nothing has been written by then.
	if err := unix.Mount("shm", "./dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=1777,size=64k"); err != nil {
		return fmt.Errorf("shm: %w", err)
	}
	return nil
}

func mountProc() error {
	err := unix.Mount("proc", "./proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	if errors.Is(err, unix.EPERM) {
		// The kernel shows a new /proc only to those who could see all of the old one.
		return fmt.Errorf("%w: /proc of the host is partly covered, as in a container without --security-opt systempaths=unconfined", err)
	}
	return err
}

// forbidNamespaces makes the kernel itself refuse further namespaces in this user namespace: a second lock behind the
// one of the filter. Only while the limits can still be written.
func (s *sandbox) forbidNamespaces() error {
	if s.nested() {
		return nil
	}
	limit := "0"
	if s.isolates() {
		limit = strconv.Itoa(isolated.NamespacesMax) // commands have the filter in front of it, which refuses them all
	}
	for _, kind := range []string{"user", "mnt", "pid", "net", "uts", "ipc", "cgroup", "time"} {
		err := os.WriteFile("proc/sys/user/max_"+kind+"_namespaces", []byte(limit), 0)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// keepWholeProc mounts a /proc without masks where nobody gets to: below what /sys then covers. The kernel lets a nested
// user namespace have a /proc of its own only while its mount namespace holds one of which nothing is hidden.
func (s *sandbox) keepWholeProc() error {
	if !s.isolates() {
		return nil
	}
	if err := unix.Mount("none", "./sys", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0,size=4k,nr_inodes=4"); err != nil {
		return err
	}
	if err := unix.Mkdir("./sys/proc", 0); err != nil {
		return err
	}
	return unix.Mount("proc", "./sys/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
}

func (s *sandbox) mountSys() error {
	sys, err := s.files.file(control.FileSys)
	if err != nil {
		return err
	}
	defer sys.Close()
	return attach(sys, "./sys")
}

// pivot makes the working directory the root and drops the old one, with all that was below it.
func pivot() error {
	if err := unix.PivotRoot(".", "."); err != nil {
		return err
	}
	// The old root lies on top of the new one now.
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return err
	}
	return unix.Chdir("/")
}

// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// supervisorLeaf holds the launcher itself on v2; see the package comment for why it must be in the tree.
const supervisorLeaf = "supervisor"

// holderName is the argv[0] by which a program knows that it is only asked to hold a namespace.
const holderName = "opensandbox-cgroup-holder"

// HoldNamespace must be the first call in main (and TestMain) of a program that uses Create. In the
// short-lived child that Prepare starts on v2 it waits until its standard input closes and exits; in
// every other process it returns at once.
func HoldNamespace() {
	if len(os.Args) != 1 || os.Args[0] != holderName {
		return
	}
	io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}

// Prepare makes the tree. On v2 it also enables the controllers, makes the namespace that sandboxes
// start in, and moves this process into <tree>/supervisor. Calling it again does nothing.
func (h *Host) Prepare(tree string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, y := range h.hiers {
		dir := filepath.Join(y.base, tree)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		if err := inheritCPUSet(dir); err != nil {
			return err
		}
	}
	if h.version != V2 || h.namespace != nil {
		return nil
	}
	y := h.hiers[0]
	dir := filepath.Join(y.base, tree)
	ns, err := treeNamespace(dir)
	if err != nil {
		return err
	}
	if err := h.settle(dir); err != nil {
		ns.Close()
		return err
	}
	h.namespace = ns
	return nil
}

// settle moves this process into the tree and enables the controllers down to the slots.
func (h *Host) settle(dir string) error {
	y := h.hiers[0]
	leaf := filepath.Join(dir, supervisorLeaf)
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	if y.own != leaf {
		if err := write(leaf, "cgroup.procs", "0"); err != nil {
			return err
		}
		h.came = y.own
	}
	err := enable(y.base, y.controllers)
	if errors.Is(err, unix.EBUSY) {
		// A delegated or containerised base is not the real root: it may not hold processes and
		// pass controllers on at once. Whoever else is in our service goes to a leaf too.
		if err = evacuate(y.base, leaf); err == nil {
			err = enable(y.base, y.controllers)
		}
	}
	if err != nil {
		return err
	}
	return enable(dir, y.controllers)
}

// evacuate moves the processes that sit directly in base. Runs once at start, so the price of writing
// ids to cgroup.procs does not matter.
func evacuate(base, leaf string) error {
	pids, err := readLines(filepath.Join(base, "cgroup.procs"))
	if err != nil {
		return err
	}
	for _, pid := range pids {
		// ESRCH: it ended meanwhile. EINVAL: a kernel thread, which cannot move.
		err := write(leaf, "cgroup.procs", pid)
		if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.EINVAL) {
			return err
		}
	}
	return nil
}

// enable passes controllers on to the children of dir.
func enable(dir string, controllers []string) error {
	if len(controllers) == 0 {
		return nil
	}
	return write(dir, "cgroup.subtree_control", "+"+strings.Join(controllers, " +"))
}

// treeNamespace returns a cgroup namespace rooted at the tree. Sandboxes that outlived our predecessor
// are in one already; a new one needs a process in the tree itself, which is possible only while the
// tree passes no controllers on.
func treeNamespace(dir string) (*os.File, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !e.IsDir() || e.Name() == supervisorLeaf {
			continue
		}
		pids, _ := readLines(filepath.Join(dir, e.Name(), execdLeaf, "cgroup.procs"))
		for _, pid := range pids {
			if ns := foreignNamespace(pid); ns != nil {
				return ns, nil
			}
		}
	}
	// Slots of a dead predecessor, swept later, still pass controllers on, and then the tree may not stop.
	for _, e := range entries {
		if e.IsDir() {
			if err := disable(filepath.Join(dir, e.Name())); err != nil {
				return nil, err
			}
		}
	}
	if err := disable(dir); err != nil {
		return nil, err
	}
	return holdNamespace(dir)
}

// disable takes back what enable passed on.
func disable(dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
	if err != nil {
		return ignoreMissing(err)
	}
	on := strings.Fields(string(text))
	if len(on) == 0 {
		return nil
	}
	return write(dir, "cgroup.subtree_control", "-"+strings.Join(on, " -"))
}

// foreignNamespace opens the cgroup namespace of a process if it is not the one we are in.
func foreignNamespace(pid string) *os.File {
	var theirs, ours unix.Stat_t
	f, err := os.Open("/proc/" + pid + "/ns/cgroup")
	if err != nil {
		return nil
	}
	if unix.Fstat(int(f.Fd()), &theirs) != nil || unix.Stat("/proc/thread-self/ns/cgroup", &ours) != nil ||
		theirs.Ino == ours.Ino {
		f.Close()
		return nil
	}
	return f
}

// holdNamespace starts a child in dir that makes the namespace there, takes a handle and ends it.
func holdNamespace(dir string) (*os.File, error) {
	group, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer group.Close()
	end, hold, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer end.Close()
	// Unshareflags, not Cloneflags: clone would root the namespace where the parent is.
	child, err := os.StartProcess("/proc/self/exe", []string{holderName}, &os.ProcAttr{
		Dir: "/", Env: []string{}, Files: []*os.File{end, nil, nil},
		Sys: &syscall.SysProcAttr{
			UseCgroupFD: true, CgroupFD: int(group.Fd()), Unshareflags: unix.CLONE_NEWCGROUP, Setsid: true,
		},
	})
	if err != nil {
		hold.Close()
		return nil, fmt.Errorf("cgroup: cannot start a process in %s: %w", dir, err)
	}
	ns, err := os.Open("/proc/" + strconv.Itoa(child.Pid) + "/ns/cgroup")
	hold.Close()
	child.Kill()
	child.Wait()
	return ns, err
}

// Leave undoes Prepare when no slot is left: this process goes back where it came from and the tree is
// removed. Slots that still exist make it fail with EBUSY, and nothing of them is touched.
func (h *Host) Leave(tree string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	var errs []error
	for _, y := range h.hiers {
		dir := filepath.Join(y.base, tree)
		if h.came != "" {
			if err := write(h.came, "cgroup.procs", "0"); err != nil {
				// Its old home may be gone; the real root always takes a process.
				errs = append(errs, write(y.base, "cgroup.procs", "0"))
			}
			h.came = ""
		}
		if h.version == V2 {
			errs = append(errs, ignoreMissing(unix.Rmdir(filepath.Join(dir, supervisorLeaf))))
		}
		if err := ignoreMissing(unix.Rmdir(dir)); err != nil {
			errs = append(errs, &os.PathError{Op: "rmdir", Path: dir, Err: err})
		}
	}
	if h.namespace != nil {
		h.namespace.Close()
		h.namespace = nil
	}
	return errors.Join(errs...)
}

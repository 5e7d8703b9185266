// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Entry is the way into the payload leaf from inside the sandbox, where no cgroup filesystem is visible.
// It is made of fds that the launcher opened and that carry the launcher's rights: close-on-exec, and
// never to be given to the payload.
type Entry struct {
	version string
	files   []*os.File
}

// PayloadEntry opens the entry of this slot.
func (g *Group) PayloadEntry() (*Entry, error) {
	e := &Entry{version: g.host.version}
	for i, y := range g.host.hiers {
		if !y.leaves() {
			continue
		}
		path, flags := filepath.Join(g.dirs[i], payloadLeaf, "tasks"), os.O_WRONLY
		if g.host.version == V2 {
			path, flags = filepath.Join(g.dirs[i], payloadLeaf), unix.O_PATH|unix.O_DIRECTORY
		}
		f, err := os.OpenFile(path, flags, 0)
		if err != nil {
			e.Close()
			return nil, err
		}
		e.files = append(e.files, f)
	}
	return e, nil
}

// Files are what to hand to init, in the order EntryFromFiles wants them. Empty without cgroups.
func (e *Entry) Files() []*os.File { return e.files }

// EntryFromFiles rebuilds an entry from inherited files; version is Host.Version of the launcher.
func EntryFromFiles(version string, files []*os.File) *Entry {
	return &Entry{version: version, files: files}
}

// EnterThread puts the calling thread, and only it, into the payload leaf; what it forks afterwards is
// born there. v1 only: call it once on a locked thread. On v2 it does nothing, see CgroupFD.
func (e *Entry) EnterThread() error {
	if e.version != V1 {
		return nil
	}
	for _, f := range e.files {
		// Not f.Write: a file inherited as a pollable fd would not stay on this thread.
		if _, err := unix.Write(int(f.Fd()), []byte("0")); err != nil {
			return fmt.Errorf("enter the payload's cgroup: %w", err)
		}
	}
	return nil
}

// CgroupFD is the directory to clone commands into on v2 (SysProcAttr.UseCgroupFD), else -1.
func (e *Entry) CgroupFD() int {
	if e.version != V2 || len(e.files) == 0 {
		return -1
	}
	return int(e.files[0].Fd())
}

// Close closes the fds, in the launcher once init has them.
func (e *Entry) Close() {
	for _, f := range e.files {
		f.Close()
	}
}

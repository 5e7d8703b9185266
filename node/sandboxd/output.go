// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/wipe"
	"opensandbox.io/node/wire"
)

// outputTail is how much of the entry point's output is told, and kept after the end.
const outputTail = 1 << 20

// entrypointLog is where execd keeps it, in the sandbox's spool.
const entrypointLog = "entrypoint.log"

// output is the end of what the entry point wrote: bytes from inside a sandbox, not to be interpreted.
func (d *Daemon) output(s *sandbox) ([]byte, error) {
	return d.spooled(s, entrypointLog, outputTail, d.records.Output)
}

// spooled reads the end of a file of the spool, or what was kept of it.
func (d *Daemon) spooled(s *sandbox, name string, most int64, kept func(id string) ([]byte, error)) ([]byte, error) {
	s.mu.Lock()
	id, state := s.record.ID, s.state
	s.mu.Unlock()
	if state != wire.ReportStateEnded {
		text, err := readTail(filepath.Join(d.spools, id), name, most)
		if err != nil || text != nil {
			return text, err
		}
		// It wrote nothing yet, or ended between the two looks, and keepOutput was faster.
	}
	text, err := kept(id)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return text, err
}

// keepOutput saves the tails of output and journal, and removes the spool with all other output.
func (d *Daemon) keepOutput(id string) error {
	dir := filepath.Join(d.spools, id)
	text, err := readTail(dir, entrypointLog, outputTail)
	if err == nil && len(text) > 0 {
		err = d.records.SaveOutput(id, text)
	}
	return errors.Join(err, d.keepJournal(id), wipe.Tree(dir))
}

// readTail reads the last bytes, at most so many, of a file in a directory that hostile code may have written to: no link is followed, and
// only a regular file is read.
func readTail(dir, name string, most int64) ([]byte, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(fd)
		fd, err = unix.Openat(fd, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	}
	if errors.Is(err, unix.ENOENT) {
		return nil, nil // it wrote nothing
	}
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: filepath.Join(dir, name), Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, &fs.PathError{Op: "open", Path: filepath.Join(dir, name), Err: errors.New("not a regular file")}
	}
	from := max(info.Size()-most, 0)
	return io.ReadAll(io.NewSectionReader(f, from, most))
}

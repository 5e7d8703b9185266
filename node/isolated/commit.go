// SPDX-License-Identifier: Apache-2.0

package isolated

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/safefile"
	"opensandbox.io/node/wipe"
	"opensandbox.io/node/wire"
)

// skippedMax bounds the list of what was left out.
const skippedMax = 1000

func (s *isolate) serveCommit(w http.ResponseWriter, _ *http.Request) error {
	if err := s.hasOverlays(); err != nil {
		return err
	}
	s.mu.Lock()
	busy := s.active > 0 || s.changing
	s.changing = s.changing || !busy
	s.mu.Unlock()
	if busy {
		return reply.Errorf(wire.CodeSessionBusy, "A run of the session is on, or another commit.")
	}
	defer func() {
		s.mu.Lock()
		s.changing = false
		s.mu.Unlock()
	}()
	c := &committer{}
	if err := s.eachChange(c.apply); err != nil {
		var f *reply.Fault
		if errors.As(err, &f) {
			return f
		}
		return reply.Errorf(wire.CodeRuntimeError, "The commit stopped: %v.", err).
			WithHint("What was changed before that stays; commit again when the cause is gone.")
	}
	reply.JSON(w, http.StatusOK, c.done)
	return nil
}

// committer makes changes of a session those of the sandbox. Each file is there whole or not at all. A session's upper
// directories stay as they are: what it sees does not change.
type committer struct{ done wire.IsolatedCommit }

func (c *committer) apply(e *entry) error {
	err := c.one(e)
	if err != nil {
		return fmt.Errorf("%s: %w", strings.ToValidUTF8(e.path, "?"), err)
	}
	return nil
}

func (c *committer) one(e *entry) error {
	if e.lower < 0 {
		return errors.New("the directory it belongs to was exchanged meanwhile")
	}
	if e.leave {
		return e.finishDirectory()
	}
	if e.change == "" {
		return nil
	}
	var err error
	switch {
	case e.change == wire.IsolatedChangeChangeDeleted:
		err = wipe.At(e.lower, e.name)
	case e.kind() == unix.S_IFDIR:
		err = e.makeDirectory()
	case e.kind() == unix.S_IFREG:
		err = e.replace(e.copyFile)
	case e.kind() == unix.S_IFLNK:
		err = e.replace(e.copyLink)
	case e.kind() == unix.S_IFIFO:
		err = e.replace(func(temporary string) error {
			if err := unix.Mkfifoat(e.lower, temporary, 0o600); err != nil {
				return err
			}
			return errors.Join(
				unix.Fchownat(e.lower, temporary, int(e.st.Uid), int(e.st.Gid), unix.AT_SYMLINK_NOFOLLOW),
				unix.Fchmodat(e.lower, temporary, e.st.Mode&0o777, 0))
		})
	default:
		if len(c.done.Skipped) < skippedMax {
			c.done.Skipped = append(c.done.Skipped, strings.ToValidUTF8(e.path, "?"))
		}
		return nil
	}
	if err != nil {
		return err
	}
	switch e.change {
	case wire.IsolatedChangeChangeCreated:
		c.done.Created++
	case wire.IsolatedChangeChangeModified:
		c.done.Modified++
	case wire.IsolatedChangeChangeDeleted:
		c.done.Deleted++
	}
	return nil
}

// makeDirectory makes sure that there is one, in place of whatever is there.
func (e *entry) makeDirectory() error {
	for range 3 { // somebody may be faster
		err := unix.Mkdirat(e.lower, e.name, 0o700)
		if !errors.Is(err, unix.EEXIST) {
			return err
		}
		var st unix.Stat_t
		if err := unix.Fstatat(e.lower, e.name, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			return nil
		}
		if err := unix.Unlinkat(e.lower, e.name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return unix.EEXIST
}

// finishDirectory gives a directory its owner, mode and time, when all is in it.
func (e *entry) finishDirectory() error {
	fd, err := openDir(e.lower, e.name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Uid != e.st.Uid || st.Gid != e.st.Gid {
		if err := unix.Fchown(fd, int(e.st.Uid), int(e.st.Gid)); err != nil {
			return err
		}
	}
	if st.Mode != e.st.Mode {
		if err := unix.Fchmod(fd, e.st.Mode&0o7777); err != nil {
			return err
		}
	}
	return unix.UtimesNanoAt(fd, ".", []unix.Timespec{e.st.Atim, e.st.Mtim}, 0)
}

// replace makes something under another name and then puts it in its place in one step.
func (e *entry) replace(make func(temporary string) error) error {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	temporary := ".opensandbox-commit-" + hex.EncodeToString(random[:])
	err := make(temporary)
	if err == nil {
		err = unix.Renameat(e.lower, temporary, e.lower, e.name)
	}
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
		if err = wipe.At(e.lower, e.name); err == nil {
			err = unix.Renameat(e.lower, temporary, e.lower, e.name)
		}
	}
	if err != nil {
		_ = unix.Unlinkat(e.lower, temporary, 0)
	}
	return err
}

func (e *entry) copyFile(temporary string) error {
	from, st, err := safefile.OpenRegular(e.upper, e.name, unix.O_RDONLY|unix.O_NOFOLLOW)
	if err != nil {
		return err
	}
	defer from.Close()
	fd, err := safefile.OpenBeneath(e.lower, temporary, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	to := os.NewFile(uintptr(fd), temporary)
	defer to.Close()
	if _, err := io.Copy(to, from); err != nil {
		return err
	}
	if err := unix.Fchown(fd, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Fchmod(fd, st.Mode&0o7777&^setID); err != nil {
		return err
	}
	return unix.UtimesNanoAt(e.lower, temporary, []unix.Timespec{st.Atim, st.Mtim}, unix.AT_SYMLINK_NOFOLLOW)
}

func (e *entry) copyLink(temporary string) error {
	target, err := readLink(e.upper, e.name)
	if err != nil {
		return err
	}
	if err := unix.Symlinkat(target, e.lower, temporary); err != nil {
		return err
	}
	return unix.Fchownat(e.lower, temporary, int(e.st.Uid), int(e.st.Gid), unix.AT_SYMLINK_NOFOLLOW)
}

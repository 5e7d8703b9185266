// SPDX-License-Identifier: Apache-2.0

package isolated

import (
	"context"
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

// skippedMax and skippedBytesMax bound the list of what was left out.
const (
	skippedMax      = 1000
	skippedBytesMax = 256 << 10
)

func (s *isolate) serveCommit(w http.ResponseWriter, r *http.Request) error {
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
	c := &committer{ctx: r.Context(), bytes: s.plan.setup.Bytes}
	if err := s.eachChange(r.Context(), c.apply); err != nil {
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
type committer struct {
	ctx     context.Context // of the request: a client that leaves stops it
	bytes   int64           // more than that no file of the session can hold
	done    wire.IsolatedCommit
	skipped int // bytes of the list
}

func (c *committer) apply(e *entry) error {
	err := c.one(e)
	if err != nil {
		return fmt.Errorf("%s: %w", strings.ToValidUTF8(e.path, "?"), err)
	}
	return nil
}

func (c *committer) one(e *entry) error {
	if e.lower < 0 {
		return errExchanged
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
		err = e.replace(func(temporary string) error { return c.copyFile(e, temporary) })
	case e.kind() == unix.S_IFLNK:
		err = e.replace(e.copyLink)
	case e.kind() == unix.S_IFIFO:
		err = e.replace(func(temporary string) error {
			if err := unix.Mkfifoat(e.lower, temporary, 0o600); err != nil {
				return err
			}
			return e.handOver(temporary)
		})
	default:
		if c.skipped += len(e.path); len(c.done.Skipped) < skippedMax && c.skipped <= skippedBytesMax {
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
	fd := e.inside // not opened again: somebody may have put another one there
	if fd < 0 {
		return errExchanged
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	times := []unix.Timespec{e.st.Atim, e.st.Mtim}
	if e.change == "" {
		return unix.UtimesNanoAt(fd, ".", times, 0)
	}
	// What is given away is the directory that was made, not one of somebody else that was moved there meanwhile.
	if e.change == wire.IsolatedChangeChangeCreated && int(st.Uid) != os.Geteuid() {
		return errExchanged
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
	return unix.UtimesNanoAt(fd, ".", times, 0)
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

// errExchanged: another program writes to the directory too.
var errExchanged = errors.New("it, or the directory it belongs to, was exchanged meanwhile")

// handOver gives what was made under a temporary name, and has no content, its owner and mode. Another program may have
// put a link there, or a second name of a file that is not its own, so it is opened and looked at first.
func (e *entry) handOver(temporary string) error {
	fd, err := safefile.OpenBeneath(e.lower, temporary, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != e.kind() || st.Nlink != 1 || int(st.Uid) != os.Geteuid() {
		return errExchanged
	}
	if err := unix.Fchownat(fd, "", int(e.st.Uid), int(e.st.Gid), unix.AT_EMPTY_PATH); err != nil {
		return err
	}
	if e.kind() == unix.S_IFLNK {
		return nil // links have no mode
	}
	return unix.Chmod(viaFD(fd), e.st.Mode&0o777)
}

func (c *committer) copyFile(e *entry, temporary string) error {
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
	if err := c.copyData(to, from, st.Size); err != nil {
		return err
	}
	if err := unix.Fchown(fd, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Fchmod(fd, st.Mode&0o7777&^setID); err != nil {
		return err
	}
	return unix.UtimesNanoAt(fd, "", []unix.Timespec{st.Atim, st.Mtim}, unix.AT_EMPTY_PATH)
}

// copyPiece is how much is copied between two looks at the context.
const copyPiece = 1 << 20

// copyData copies what a file holds and leaves its holes: a size is easily said, and the disk is the host's.
func (c *committer) copyData(to, from *os.File, size int64) error {
	left := c.bytes
	for at := int64(0); ; {
		start, err := nextData(from, at, size)
		if err != nil {
			return err
		}
		if start >= size {
			return to.Truncate(size)
		}
		end, err := unix.Seek(int(from.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		end = min(end, size)
		if left -= end - start; left < 0 {
			return fmt.Errorf("the file holds more than the %d bytes that the session may", c.bytes)
		}
		for at = start; at < end; {
			if err := c.ctx.Err(); err != nil {
				return err
			}
			n, err := io.Copy(io.NewOffsetWriter(to, at), io.NewSectionReader(from, at, min(copyPiece, end-at)))
			if err != nil {
				return err
			}
			if n == 0 {
				return errors.New("the file has just changed")
			}
			at += n
		}
	}
}

func (e *entry) copyLink(temporary string) error {
	target, err := readLink(e.upper, e.name)
	if err != nil {
		return err
	}
	if err := unix.Symlinkat(target, e.lower, temporary); err != nil {
		return err
	}
	return e.handOver(temporary)
}

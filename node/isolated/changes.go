// SPDX-License-Identifier: Apache-2.0

package isolated

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/safefile"
	"opensandbox.io/node/wire"
)

const (
	// depthMax is deeper than people go. Each level holds two descriptors.
	depthMax = 128
	// listMax is how many changes a list has, and listBytesMax how long it is: a path has up to 32 KiB.
	listMax      = 10000
	listBytesMax = 8 << 20
	// namesMax is how many names of a directory are held at once, on each level.
	namesMax = 512
	// tarFactor bounds an archive, in what the session may hold: files with holes have sizes that nobody can hold. Names
	// of one file count each.
	tarFactor = 4
)

// entry is something in an upper directory and what it stands for.
type entry struct {
	path   string // as the sandbox has it
	name   string
	upper  int // directory that it is in; -1: it is only in the lower one
	lower  int // the same of the sandbox; -1: there is none
	st     unix.Stat_t
	change wire.IsolatedChangeChange // empty: none
	opaque bool                      // a directory in place of another
	leave  bool                      // a directory whose entries have all been seen
	inside int                       // then: the directory of the sandbox; -1: there is none
}

func (e *entry) kind() uint32 { return e.st.Mode & unix.S_IFMT }

// walk visits what is in an upper directory, in order, directories before and after what is in them. The upper directory
// was filled by hostile programs, and the sandbox's own may rearrange the lower one: nothing is opened by more than one
// name, and no link is followed.
func walk(ctx context.Context, upper, lower int, at string, depth int, opaque bool, visit func(*entry) error) error {
	if depth > depthMax {
		return reply.Errorf(wire.CodeInvalidRequestBody, "Directories of the session are nested more than %d deep.", depthMax)
	}
	err := eachName(ctx, upper, func(name string) error {
		e := &entry{path: path.Join(at, name), name: name, upper: upper, lower: lower}
		if err := unix.Fstatat(upper, name, &e.st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			if errors.Is(err, unix.ENOENT) {
				return nil // a run is on
			}
			return err
		}
		if err := e.compare(ctx); err != nil {
			return err
		}
		switch {
		case e.change != wire.IsolatedChangeChangeDeleted && e.kind() == unix.S_IFDIR:
			return e.descend(ctx, depth, visit)
		case e.change != "":
			return visit(e)
		}
		return nil
	})
	if err != nil || !opaque || lower < 0 {
		return err
	}
	// What the directory had before it was replaced is gone.
	return eachName(ctx, lower, func(name string) error {
		var st unix.Stat_t
		if err := unix.Fstatat(upper, name, &st, unix.AT_SYMLINK_NOFOLLOW); !errors.Is(err, unix.ENOENT) {
			return err
		}
		e := &entry{path: path.Join(at, name), name: name, upper: -1, lower: lower, change: wire.IsolatedChangeChangeDeleted}
		if unix.Fstatat(lower, name, &e.st, unix.AT_SYMLINK_NOFOLLOW) != nil {
			return nil
		}
		return visit(e)
	})
}

// descend visits a directory and what is in it.
func (e *entry) descend(ctx context.Context, depth int, visit func(*entry) error) error {
	upper, err := openDir(e.upper, e.name)
	if err != nil {
		return err
	}
	defer unix.Close(upper)
	e.opaque = isOpaque(upper)
	if err := visit(e); err != nil {
		return err
	}
	e.inside = -1
	if e.lower >= 0 {
		// A commit has made it by now; something else than a directory is not looked into.
		if fd, err := openDir(e.lower, e.name); err == nil {
			e.inside = fd
			defer unix.Close(fd)
		}
	}
	if err := walk(ctx, upper, e.inside, e.path, depth+1, e.opaque, visit); err != nil {
		return err
	}
	e.leave = true
	return visit(e)
}

func openDir(at int, name string) (int, error) {
	return safefile.OpenBeneath(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
}

// eachName gives the names in a directory, some at a time, which are sorted: hostile programs make millions.
func eachName(ctx context.Context, dir int, visit func(name string) error) error {
	// A descriptor of its own, because reading moves the position.
	fd, err := unix.Openat(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "dir")
	defer f.Close()
	for {
		names, err := f.Readdirnames(namesMax)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		slices.Sort(names)
		for _, name := range names {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := visit(name); err != nil {
				return err
			}
		}
	}
}

// isOpaque reads the mark of a directory that hides the one below it.
func isOpaque(dir int) bool {
	var value [1]byte
	n, err := unix.Fgetxattr(dir, "user.overlay.opaque", value[:])
	return err == nil && n == 1 && value[0] == 'y'
}

// compare finds out what a name in the upper directory means for the sandbox.
func (e *entry) compare(ctx context.Context) error {
	var old unix.Stat_t
	there := e.lower >= 0
	if there {
		err := unix.Fstatat(e.lower, e.name, &old, unix.AT_SYMLINK_NOFOLLOW)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		there = err == nil
	}
	if e.kind() == unix.S_IFCHR && e.st.Rdev == 0 { // overlayfs's word for "gone"
		if there {
			e.change, e.st = wire.IsolatedChangeChangeDeleted, old
		}
		return nil
	}
	if !there {
		e.change = wire.IsolatedChangeChangeCreated
		return nil
	}
	same, err := e.same(ctx, &old)
	if err == nil && !same {
		e.change = wire.IsolatedChangeChangeModified
	}
	return err
}

// setID are mode bits that a commit leaves out of files: nothing that a session makes shall lend the sandbox's users to
// others.
const setID = unix.S_ISUID | unix.S_ISGID

// same: a program may have opened a file for writing and not written; then it has been copied up and is no change. Times
// do not count.
func (e *entry) same(ctx context.Context, old *unix.Stat_t) (bool, error) {
	now, before := e.st.Mode, old.Mode
	if e.kind() == unix.S_IFREG {
		now, before = now&^setID, before&^setID
	}
	if now != before || e.st.Uid != old.Uid || e.st.Gid != old.Gid {
		return false, nil
	}
	switch e.kind() {
	case unix.S_IFREG:
		if e.st.Size != old.Size {
			return false, nil
		}
		return e.sameContent(ctx), ctx.Err()
	case unix.S_IFLNK:
		now, err := readLink(e.upper, e.name)
		if err != nil {
			return false, err
		}
		before, err := readLink(e.lower, e.name)
		return err == nil && now == before, nil
	}
	return true, nil
}

// sameContent passes over holes that both files have: reading them takes for ever.
func (e *entry) sameContent(ctx context.Context) bool {
	now, st, err := safefile.OpenRegular(e.upper, e.name, unix.O_RDONLY|unix.O_NOFOLLOW)
	if err != nil {
		return false
	}
	defer now.Close()
	before, old, err := safefile.OpenRegular(e.lower, e.name, unix.O_RDONLY|unix.O_NOFOLLOW)
	if err != nil || st.Size != old.Size {
		return false
	}
	defer before.Close()
	a, b := make([]byte, 64<<10), make([]byte, 64<<10)
	for at := int64(0); ; {
		x, err1 := nextData(now, at, st.Size)
		y, err2 := nextData(before, at, st.Size)
		if err1 != nil || err2 != nil || ctx.Err() != nil {
			return false
		}
		if at = min(x, y); at >= st.Size {
			return true
		}
		n, err1 := now.ReadAt(a, at)
		m, err2 := before.ReadAt(b, at)
		if n != m || !bytes.Equal(a[:n], b[:m]) {
			return false
		}
		if err1 != nil || err2 != nil {
			return errors.Is(err1, io.EOF) && errors.Is(err2, io.EOF)
		}
		at += int64(n)
	}
}

// nextData is where a file has something else than a hole, at this place or after it; its size: nowhere.
func nextData(f *os.File, at, size int64) (int64, error) {
	found, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return size, nil
	}
	return found, err
}

func readLink(dir int, name string) (string, error) {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(dir, name, buf)
	return string(buf[:max(n, 0)]), err
}

// kindName is the contract's word.
func (e *entry) kindName() wire.IsolatedChangeType {
	switch e.kind() {
	case unix.S_IFREG:
		return wire.IsolatedChangeTypeFile
	case unix.S_IFDIR:
		return wire.IsolatedChangeTypeDirectory
	case unix.S_IFLNK:
		return wire.IsolatedChangeTypeSymlink
	}
	return wire.IsolatedChangeTypeOther
}

// eachChange visits what changed in all overlays.
func (s *isolate) eachChange(ctx context.Context, visit func(*entry) error) error {
	for _, l := range s.layers {
		lower, err := unix.Openat(int(l.lower.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		err = walk(ctx, int(l.upper.Fd()), lower, l.path, 0, false, visit)
		_ = unix.Close(lower)
		if err != nil {
			return err
		}
	}
	return nil
}

// hasOverlays refuses what makes no sense without.
func (s *isolate) hasOverlays() error {
	if err := s.usable(); err != nil {
		return err
	}
	if len(s.layers) == 0 {
		return invalid("The session has no overlay whose changes are kept.").
			WithHint("What it writes to rw paths is there already; create it with mode overlay to look at changes first.")
	}
	return nil
}

var errEnough = errors.New("the list is full")

func (s *isolate) serveDiff(w http.ResponseWriter, r *http.Request) error {
	if err := s.hasOverlays(); err != nil {
		return err
	}
	switch format := r.URL.Query().Get("format"); format {
	case "", "json":
	case "tar":
		return s.sendTar(w, r)
	default:
		return reply.Errorf(wire.CodeInvalidQuery, "format must be json or tar, not %.64q.", format)
	}
	return s.sendList(w, r)
}

// sendList writes the list as it is found: nothing of it is kept.
func (s *isolate) sendList(w http.ResponseWriter, r *http.Request) error {
	out := bufio.NewWriterSize(w, 32<<10)
	count, size := 0, 0
	begin := func() {
		if count == 0 {
			w.Header().Set("Content-Type", "application/json")
			_, _ = out.WriteString(`{"changes":[`)
		}
	}
	err := s.eachChange(r.Context(), func(e *entry) error {
		if e.change == "" || e.leave {
			return nil
		}
		change := wire.IsolatedChange{Path: strings.ToValidUTF8(e.path, "?"), Change: e.change, Type: e.kindName()}
		if e.kind() == unix.S_IFREG {
			change.Size = &e.st.Size
		}
		text, err := reply.Marshal(change)
		if err != nil {
			return err
		}
		if size += len(text) + 1; count == listMax || size > listBytesMax {
			return errEnough
		}
		begin()
		if count > 0 {
			_ = out.WriteByte(',')
		}
		count++
		_, err = out.Write(text)
		return err
	})
	full := errors.Is(err, errEnough)
	if err != nil && !full {
		if count == 0 {
			return err
		}
		panic(http.ErrAbortHandler) // a list must not be less than it seems
	}
	begin()
	end := "]}\n"
	if full {
		end = `],"truncated":true}` + "\n"
	}
	_, _ = out.WriteString(end)
	_ = out.Flush() // a client that has left
	return nil
}

// sendTar sends the changes as an image layer would hold them.
func (s *isolate) sendTar(w http.ResponseWriter, r *http.Request) error {
	most := tarFactor * s.plan.setup.Bytes
	// Looked at before anything is sent, so that a refusal can be told.
	if err := s.eachChange(r.Context(), (&measure{left: most}).add); err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/x-tar")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	out := tar.NewWriter(w)
	again := &measure{left: most} // programs of the session may run meanwhile
	err := s.eachChange(r.Context(), func(e *entry) error {
		if e.change == "" || e.leave {
			return nil
		}
		return writeTar(out, e, again)
	})
	if err == nil {
		err = out.Close()
	}
	if err != nil {
		panic(http.ErrAbortHandler) // an archive must not be less than it seems
	}
	return nil
}

// measure adds up what an archive will hold.
type measure struct{ left int64 }

func (m *measure) add(e *entry) error {
	if e.change == "" || e.leave || e.change == wire.IsolatedChangeChangeDeleted || e.kind() != unix.S_IFREG {
		return nil
	}
	if e.st.Size > m.left {
		return invalid("The archive would be too large: with %.300q of %d bytes its files are, by their sizes, more than %d times what the session may hold.",
			strings.ToValidUTF8(e.path, "?"), e.st.Size, tarFactor).
			WithHint("An archive has no holes. Commit the session instead, which keeps them, or remove the file.")
	}
	m.left -= e.st.Size
	return nil
}

func writeTar(out *tar.Writer, e *entry, room *measure) error {
	name := strings.TrimPrefix(e.path, "/")
	if e.change == wire.IsolatedChangeChangeDeleted {
		dir, base := path.Split(name)
		return out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: dir + ".wh." + base, Format: tar.FormatPAX})
	}
	h := &tar.Header{
		Name: name, Mode: int64(e.st.Mode & 0o7777), Uid: int(e.st.Uid), Gid: int(e.st.Gid),
		ModTime: time.Unix(e.st.Mtim.Unix()), Format: tar.FormatPAX,
	}
	switch e.kind() {
	case unix.S_IFDIR:
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
		err := out.WriteHeader(h)
		if err == nil && e.opaque {
			err = out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name + "/.wh..wh..opq", Format: tar.FormatPAX})
		}
		return err
	case unix.S_IFLNK:
		target, err := readLink(e.upper, e.name)
		if err != nil {
			return err
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, target
		return out.WriteHeader(h)
	case unix.S_IFREG:
		f, st, err := safefile.OpenRegular(e.upper, e.name, unix.O_RDONLY|unix.O_NOFOLLOW)
		if err != nil {
			return err
		}
		defer f.Close()
		e.st.Size = st.Size
		if err := room.add(e); err != nil {
			return err
		}
		h.Typeflag, h.Size = tar.TypeReg, st.Size
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		_, err = io.CopyN(out, f, st.Size)
		return err
	}
	return nil // FIFOs and sockets have no content
}

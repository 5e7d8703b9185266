// SPDX-License-Identifier: Apache-2.0

package file

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/safefile"
	"opensandbox.io/node/wire"
)

const (
	// laterMax bounds the directories whose attributes wait for the end, in bytes of names.
	laterMax = 4 << 20
	// paddingMax is how much may follow an archive's end; tar programs fill a block of ten kibibytes or so.
	paddingMax = 1 << 20
)

// unpack extracts a tar archive, plain or with gzip, below a directory. Archive and tree are both hostile: no entry
// gets out of the directory, by name, by link or by a race with somebody who rearranges it.
func (a *API) unpack(w http.ResponseWriter, r *http.Request) error {
	given, err := required(r, "path")
	if err != nil {
		return err
	}
	owners, err := boolean(r, "owners", true)
	if err != nil {
		return err
	}
	p, err := a.locate(given, true)
	if err != nil {
		return err
	}
	defer p.Close()
	made, err := p.ensureDirectory()
	if err != nil {
		return explain(given, err)
	}
	root, err := openDir(p.fd(), p.name)
	if err != nil {
		return explain(given, err)
	}
	defer root.Close()
	if err := safefile.CheckNotProc(int(root.Fd())); err != nil {
		return explain(given, err)
	}
	x := &unpacker{root: root, owners: owners && a.root, made: made}
	err = x.extract(r.Context(), readFrom{r.Body})
	x.leave()
	if err != nil {
		return x.explain(given, err)
	}
	reply.JSON(w, http.StatusOK, wire.TarResult{Path: escape(p.path), Entries: x.entries, Bytes: x.bytes})
	return nil
}

// ensureDirectory makes the directory if there is nothing, and says whether it did.
func (p *place) ensureDirectory() (made bool, err error) {
	if p.name == "." {
		return false, nil
	}
	if err := p.follow(); err != nil {
		return false, err
	}
	err = unix.Mkdirat(p.fd(), p.name, 0o755)
	if err == unix.EEXIST {
		return false, nil
	}
	return err == nil, err
}

// unpacker extracts one archive.
type unpacker struct {
	root   *os.File
	owners bool // give files to whom the archive says
	made   bool // the root is new, so it is the archive's

	parent     *os.File // the directory of the last entry: the next is often in it too
	parentName string

	later      []directory
	laterBytes int

	entries int64
	bytes   int64
	current string // the entry that is being extracted
}

// directory waits for its attributes: a time that later entries would change, a mode that would keep them out.
type directory struct {
	name string
	tar.Header
}

// errRefused is what an archive must not hold.
type errRefused struct{ why string }

func (e *errRefused) Error() string { return e.why }

func refuse(format string, args ...any) error { return &errRefused{fmt.Sprintf(format, args...)} }

func (x *unpacker) explain(given string, err error) error {
	at := fmt.Sprintf("After %d entries", x.entries)
	if x.current != "" {
		at = fmt.Sprintf("Entry %d (%.200s)", x.entries+1, asGiven(x.current))
	}
	var (
		refused *errRefused
		broken  *readError
		fault   *reply.Fault
	)
	const hint = "The entries before it have been extracted and stay."
	switch {
	case errors.As(err, &refused):
		return reply.Errorf(wire.CodeInvalidFileContent, "%s: %s.", at, refused.why).WithHint("%s Leave this one out of the archive.", hint)
	case errors.Is(err, errNoEnd):
		if x.entries == 0 {
			return reply.Errorf(wire.CodeInvalidFileContent, "The archive ends early: %v.", err).WithHint("Nothing was extracted. Send a whole archive.")
		}
		return reply.Errorf(wire.CodeInvalidFileContent, "%s: the archive ends early: %v.", at, err).
			WithHint("%d entries have been extracted and stay. Send a whole archive.", x.entries)
	case errors.As(err, &broken), errors.Is(err, io.ErrUnexpectedEOF):
		return reply.Errorf(wire.CodeInvalidFileContent, "%s: the body ends early: %v.", at, err).WithHint("%s Send the archive again.", hint)
	case errors.Is(err, tar.ErrHeader), errors.Is(err, tar.ErrFieldTooLong), errors.Is(err, gzip.ErrHeader), errors.Is(err, gzip.ErrChecksum):
		return reply.Errorf(wire.CodeInvalidFileContent, "%s: this is not a tar archive: %v.", at, err).WithHint("%s Send tar, or tar with gzip.", hint)
	case errors.Is(err, unix.EINVAL) && x.owners:
		return reply.Errorf(wire.CodeInvalidFileContent, "%s: its owner does not exist in the sandbox.", at).WithHint("%s Send it with owners=false.", hint)
	}
	if errors.As(explain(given, err), &fault) {
		told := *fault
		told.Message = at + ": " + told.Message
		told.Hint = strings.TrimSpace(hint + " " + told.Hint)
		return &told
	}
	return err
}

// extract reads the archive to its end.
func (x *unpacker) extract(ctx context.Context, body io.Reader) error {
	in := bufio.NewReaderSize(body, bufferSize)
	plain := io.Reader(in)
	if magic, _ := in.Peek(2); len(magic) == 2 && magic[0] == 0x1f && magic[1] == 0x8b {
		unzip, err := gzip.NewReader(in)
		if err != nil {
			return err
		}
		defer unzip.Close()
		plain = unzip
	}
	whole := &endless{Reader: plain}
	archive := tar.NewReader(whole)
	for {
		x.current = ""
		if err := ctx.Err(); err != nil {
			return &readError{err}
		}
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			if whole.ended {
				return errNoEnd
			}
			break
		}
		if err != nil {
			return err
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		x.current = h.Name
		if err := x.entry(h, archive); err != nil {
			return err
		}
		x.entries++
	}
	x.current = ""
	// To the end: only there gzip tells whether all of it was right.
	n, err := io.Copy(io.Discard, io.LimitReader(plain, paddingMax))
	if err == nil && n == paddingMax {
		err = refuse("more than %d bytes follow the end of the archive", paddingMax)
	}
	if err != nil {
		return err
	}
	return x.finish()
}

// errNoEnd is of an archive without its last two blocks of zeros. All tar programs write them, and nothing else tells
// a whole archive from one that was cut between two entries, which tar.Reader takes for whole. One block of zeros is
// not enough: it is what a cut in the middle of the end leaves.
var errNoEnd = errors.New("the two blocks of zeros that end an archive are missing")

// endless notes that its reader was asked for more than there is. Reading an archive that has its end never does.
type endless struct {
	io.Reader
	ended bool
}

func (e *endless) Read(p []byte) (int, error) {
	n, err := e.Reader.Read(p)
	if n > 0 && errors.Is(err, io.EOF) {
		return n, nil // it will say so again
	}
	e.ended = e.ended || errors.Is(err, io.EOF)
	return n, err
}

// entryName is a name in the archive as a clean path below the root; "." is the root itself.
func entryName(name string) (string, error) {
	switch {
	case name == "":
		return "", refuse("the name is empty")
	case strings.HasPrefix(name, "/"):
		return "", refuse("the name is absolute")
	case strings.IndexByte(name, 0) >= 0:
		return "", refuse("the name holds a NUL byte")
	case len(name) >= unix.PathMax:
		return "", refuse("the name is longer than %d bytes", unix.PathMax-1)
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", refuse("the name leads out of the directory with ..")
		}
	}
	return path.Clean(name), nil
}

func (x *unpacker) entry(h *tar.Header, body io.Reader) error {
	name, err := entryName(h.Name)
	if err != nil {
		return err
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return refuse("sparse files are not understood")
		}
	}
	if name == "." {
		if h.Typeflag != tar.TypeDir {
			return refuse("the directory itself cannot become something else")
		}
		if x.made {
			return x.postpone(name, h)
		}
		return nil // it was there before, and what it is, is not the archive's business
	}
	parent, err := x.below(path.Dir(name))
	if err != nil {
		return err
	}
	at, base := int(parent.Fd()), path.Base(name)
	switch h.Typeflag {
	case tar.TypeDir:
		if err := x.makeDirectory(at, base, uint32(h.Mode)); err != nil {
			return err
		}
		return x.postpone(name, h)
	case tar.TypeReg:
		return x.file(at, base, h, body)
	case tar.TypeSymlink:
		return x.symlink(at, base, h)
	case tar.TypeLink:
		return x.link(at, base, h)
	case tar.TypeChar, tar.TypeBlock:
		return refuse("it is a device")
	case tar.TypeFifo:
		return refuse("it is a FIFO")
	case tar.TypeGNUSparse:
		return refuse("sparse files are not understood")
	}
	return refuse("its kind %q is unknown", h.Typeflag)
}

// below opens a directory in the tree and makes what is missing on the way. A link on the way is refused.
func (x *unpacker) below(name string) (*os.File, error) {
	if x.parent != nil && x.parentName == name {
		return x.parent, nil
	}
	x.leave()
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW
	fd, err := safefile.OpenBeneath(int(x.root.Fd()), name, flags, 0)
	if err == unix.ENOENT {
		fd, err = x.makeBelow(name, flags)
	}
	if strayed(err) {
		return nil, refuse("it lies below something that is not a directory, or below a link")
	}
	if err != nil {
		return nil, err
	}
	if err := safefile.CheckNotProc(fd); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	x.parent, x.parentName = os.NewFile(uintptr(fd), name), name
	return x.parent, nil
}

// strayed is true for what the kernel says of a path that does not stay below a directory: it passes a link, or
// somebody moves what it passes.
func strayed(err error) bool { return err == unix.ELOOP || err == unix.ENOTDIR || err == unix.EXDEV }

func (x *unpacker) makeBelow(name string, flags int) (int, error) {
	at, err := unix.FcntlInt(x.root.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	for part := range strings.SplitSeq(name, "/") {
		if err != nil {
			return -1, err
		}
		if err = unix.Mkdirat(at, part, 0o755); err == unix.EEXIST {
			err = nil
		}
		next := -1
		if err == nil {
			next, err = safefile.OpenBeneath(at, part, flags, 0)
		}
		_ = unix.Close(at)
		at = next
	}
	return at, err
}

// leave closes the directory of the last entry.
func (x *unpacker) leave() {
	if x.parent != nil {
		_ = x.parent.Close()
		x.parent = nil
	}
}

func (x *unpacker) makeDirectory(at int, base string, mode uint32) error {
	err := unix.Mkdirat(at, base, mode&0o777|0o700)
	if err != unix.EEXIST {
		return err
	}
	fd, err := safefile.OpenBeneath(at, base, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if strayed(err) {
		return refuse("something that is not a directory has the name of a directory")
	}
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// postpone keeps a directory's attributes for the end, as many as there is room for; the oldest get theirs now.
func (x *unpacker) postpone(name string, h *tar.Header) error {
	x.later = append(x.later, directory{name, tar.Header{Mode: h.Mode, Uid: h.Uid, Gid: h.Gid, ModTime: h.ModTime}})
	x.laterBytes += len(name) + 256
	for x.laterBytes > laterMax {
		first := x.later[0]
		x.later = x.later[1:]
		x.laterBytes -= len(first.name) + 256
		if err := x.dressDirectory(first); err != nil {
			return err
		}
	}
	return nil
}

// finish gives the directories their attributes, those inside before those around them.
func (x *unpacker) finish() error {
	for i := len(x.later) - 1; i >= 0; i-- {
		if err := x.dressDirectory(x.later[i]); err != nil {
			x.current = x.later[i].name
			return err
		}
	}
	return nil
}

func (x *unpacker) dressDirectory(d directory) error {
	fd, err := safefile.OpenBeneath(int(x.root.Fd()), d.name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err == unix.ENOENT || strayed(err) {
		return nil // gone, or replaced by a later entry
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return x.dress(fd, &d.Header)
}

// dress gives what is open the owner, mode and time of its entry.
func (x *unpacker) dress(fd int, h *tar.Header) error {
	want := attributes{mode: int(h.Mode & 0o7777), uid: -1, gid: -1}
	if x.owners {
		if err := ownersInRange(h); err != nil {
			return err
		}
		want.uid, want.gid = h.Uid, h.Gid
	}
	if err := dress(fd, want); err != nil {
		return err
	}
	return unix.UtimesNanoAt(fd, "", times(h.ModTime), unix.AT_EMPTY_PATH)
}

func ownersInRange(h *tar.Header) error {
	const most = 1<<32 - 2 // one more means "leave it"
	if h.Uid < 0 || h.Uid > most || h.Gid < 0 || h.Gid > most {
		return refuse("its owner %d:%d is not one", h.Uid, h.Gid)
	}
	return nil
}

// times are those of access, left as it is, and of modification.
func times(modified time.Time) []unix.Timespec {
	return []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: modified.Unix(), Nsec: int64(modified.Nanosecond())}}
}

// file extracts into a temporary file that then takes the name: what had it, link or file, is never written through.
func (x *unpacker) file(at int, base string, h *tar.Header, body io.Reader) (err error) {
	p := &place{dir: x.parent, name: base}
	temp, f, err := p.temporary(p.exists())
	if err != nil {
		return err
	}
	defer f.Close()
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	n, err := io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{body}, buf[:])
	x.bytes += n
	if err == nil {
		err = x.dress(int(f.Fd()), h)
	}
	return x.place(at, temp, base, err)
}

func (x *unpacker) symlink(at int, base string, h *tar.Header) error {
	if h.Linkname == "" || len(h.Linkname) >= unix.PathMax || strings.IndexByte(h.Linkname, 0) >= 0 {
		return refuse("it is a link to nothing that can be named")
	}
	if x.owners {
		if err := ownersInRange(h); err != nil {
			return err
		}
	}
	temp := temporaryName(exists(at, base))
	if err := unix.Symlinkat(h.Linkname, at, temp); err != nil {
		return err
	}
	var err error
	if x.owners {
		err = unix.Fchownat(at, temp, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW)
	}
	if err == nil {
		err = unix.UtimesNanoAt(at, temp, times(h.ModTime), unix.AT_SYMLINK_NOFOLLOW)
	}
	return x.place(at, temp, base, err)
}

// link gives a file that lies below the root a second name.
func (x *unpacker) link(at int, base string, h *tar.Header) error {
	target, err := entryName(h.Linkname)
	if err != nil {
		return refuse("the file it is a hard link to: %v", err)
	}
	fd, err := safefile.OpenBeneath(int(x.root.Fd()), path.Dir(target), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err == unix.ENOENT || strayed(err) {
		return refuse("it is a hard link to a file that is not there, or lies below a link")
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	temp := temporaryName(exists(at, base))
	err = unix.Linkat(fd, path.Base(target), at, temp, 0)
	if err == unix.ENOENT {
		return refuse("it is a hard link to a file that is not there")
	}
	if err == unix.EPERM || err == unix.EXDEV {
		return refuse("it is a hard link to something that cannot be linked")
	}
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err = unix.Fstatat(at, temp, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = refuse("it is a hard link to %s", safefile.KindName(st.Mode))
	}
	return x.place(at, temp, base, err)
}

// place moves what is complete to its name, and takes it away if something failed.
func (x *unpacker) place(at int, temp, base string, err error) error {
	if err == nil {
		err = unix.Renameat(at, temp, at, base)
		if err == unix.EISDIR || err == unix.ENOTEMPTY {
			err = refuse("a directory has its name")
		}
	}
	// Also after success: renaming one name of a file over another name of the same does nothing.
	if unlinked := unix.Unlinkat(at, temp, 0); err == nil && unlinked != unix.ENOENT {
		err = unlinked
	}
	return err
}

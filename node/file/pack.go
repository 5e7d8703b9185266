// SPDX-License-Identifier: Apache-2.0

package file

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/safefile"
	"opensandbox.io/node/wire"
)

// linksMax bounds what is remembered about files with several names, in bytes of names. Beyond it the other names
// become files of their own: larger, not wrong.
const linksMax = 4 << 20

// tarSkipped is the trailer that counts what an archive cannot hold.
const tarSkipped = "X-Tar-Skipped"

// errShrunk: a file became shorter while it was sent, after its size was. There is no way to say that in an archive.
var errShrunk = errors.New("a file became shorter while it was read")

// pack sends a directory, or a file, as a tar archive. An archive that cannot be completed breaks off without the end
// of the HTTP body, so that nobody takes it for whole.
func (a *API) pack(w http.ResponseWriter, r *http.Request) error {
	given, err := required(r, "path")
	if err != nil {
		return err
	}
	zipped, err := boolean(r, "gzip", false)
	if err != nil {
		return err
	}
	root, err := a.locate(given, false)
	if err != nil {
		return err
	}
	defer root.Close()
	var st unix.Stat_t
	if err := unix.Fstatat(root.fd(), root.name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return explain(given, err)
	}
	kind := st.Mode & unix.S_IFMT
	if kind != unix.S_IFDIR && kind != unix.S_IFREG {
		return explain(given, fmt.Errorf("%w but %s", safefile.ErrNotRegular, safefile.KindName(st.Mode)))
	}
	out := newPacker(w, zipped)
	if r.Method == http.MethodHead {
		return nil
	}
	if kind == unix.S_IFREG {
		return out.finish(given, out.add(root.fd(), root.name, root.name))
	}
	dir, err := openDir(root.fd(), root.name)
	if err != nil {
		return explain(given, err)
	}
	defer dir.Close()
	if err := safefile.CheckNotProc(int(dir.Fd())); err != nil {
		return explain(given, err)
	}
	if err := out.add(int(dir.Fd()), ".", "./"); err != nil {
		return out.finish(given, err)
	}
	names := prefix{""}
	return out.finish(given, walk(r.Context(), dir, 1, func(at int, name string, level int, isDir bool) (bool, error) {
		full := strings.TrimPrefix(names.at(level, name, isDir), "/")
		return true, out.add(at, name, full)
	}))
}

// packer writes an archive. Nothing goes out before the first buffer is full, so that an early failure is an answer.
type packer struct {
	w       http.ResponseWriter
	buf     *bufio.Writer
	zip     *gzip.Writer // nil: not compressed
	tar     *tar.Writer
	sent    *begun
	links   map[[2]uint64]string // device and inode to the first name
	bytes   int                  // in links
	skipped int
}

// begun remembers whether the answer has begun.
type begun struct {
	http.ResponseWriter
	yes bool
}

func (b *begun) Write(p []byte) (int, error) {
	b.yes = true
	return b.ResponseWriter.Write(p)
}

func newPacker(w http.ResponseWriter, zipped bool) *packer {
	p := &packer{w: w, sent: &begun{ResponseWriter: w}, links: map[[2]uint64]string{}}
	p.buf = bufio.NewWriterSize(struct{ io.Writer }{p.sent}, bufferSize)
	var out io.Writer = p.buf
	w.Header().Set("Content-Type", "application/x-tar")
	if zipped {
		w.Header().Set("Content-Type", "application/gzip")
		p.zip, _ = gzip.NewWriterLevel(p.buf, gzip.BestSpeed) // a constant level is never wrong
		out = p.zip
	}
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Trailer", tarSkipped)
	p.tar = tar.NewWriter(out)
	return p
}

// finish ends the archive, or the connection.
func (p *packer) finish(given string, err error) error {
	if err == nil {
		err = p.tar.Close()
	}
	if err == nil && p.zip != nil {
		err = p.zip.Close()
	}
	if err == nil {
		err = p.buf.Flush()
	}
	if err == nil {
		p.w.Header().Set(tarSkipped, fmt.Sprint(p.skipped))
		return nil
	}
	if p.sent.yes {
		panic(http.ErrAbortHandler)
	}
	for _, name := range []string{"Trailer", "Content-Type"} {
		p.w.Header().Del(name)
	}
	if errors.Is(err, errShrunk) {
		return reply.Errorf(wire.CodeInvalidFile, "%s: %v.", asGiven(given), err).WithHint("Ask again when nothing writes there.")
	}
	return explain(given, err)
}

// add writes one entry. What has vanished since it was listed is left out, as if it had done so before.
func (p *packer) add(dir int, name, shown string) error {
	var st unix.Stat_t
	err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil {
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			err = p.directory(dir, name, shown, &st)
		case unix.S_IFLNK:
			err = p.symlink(dir, name, shown, &st)
		case unix.S_IFREG:
			err = p.file(dir, name, shown)
		default:
			p.skipped++
			return nil
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", asGiven(shown), err)
	}
	return nil
}

func header(shown string, st *unix.Stat_t, kind byte) *tar.Header {
	return &tar.Header{
		Typeflag: kind, Name: shown, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX,
	}
}

func (p *packer) directory(dir int, name, shown string, st *unix.Stat_t) error {
	// The walk would pass over a directory that this user cannot read; an archive must not be less than it seems.
	sub, err := openDir(dir, name)
	if err == unix.ELOOP || err == unix.ENOTDIR {
		p.skipped++ // exchanged for something else just now
		return nil
	}
	if err != nil {
		return err
	}
	_ = sub.Close()
	return p.tar.WriteHeader(header(strings.TrimSuffix(shown, "/")+"/", st, tar.TypeDir))
}

func (p *packer) symlink(dir int, name, shown string, st *unix.Stat_t) error {
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(dir, name, buf)
	if err == unix.EINVAL {
		p.skipped++ // exchanged for something else just now
		return nil
	}
	if err != nil {
		return err
	}
	h := header(shown, st, tar.TypeSymlink)
	h.Linkname = string(buf[:n])
	return p.tar.WriteHeader(h)
}

func (p *packer) file(dir int, name, shown string) error {
	f, st, err := safefile.OpenRegular(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW)
	if errors.Is(err, safefile.ErrNotRegular) || errors.Is(err, unix.ELOOP) {
		p.skipped++ // exchanged for something else just now
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if first := p.linked(st, shown); first != "" {
		h := header(shown, st, tar.TypeLink)
		h.Linkname = first
		return p.tar.WriteHeader(h)
	}
	return p.contents(f, st, shown)
}

// linked gives the first name of a file that has been sent already, and remembers this one if not.
func (p *packer) linked(st *unix.Stat_t, shown string) string {
	if st.Nlink < 2 {
		return ""
	}
	key := [2]uint64{uint64(st.Dev), st.Ino}
	if first, ok := p.links[key]; ok {
		return first
	}
	if p.bytes < linksMax {
		p.links[key] = shown
		p.bytes += len(shown) + 64
	}
	return ""
}

// contents writes a file. A small one is read before its size is told, so that it may change as it likes.
func (p *packer) contents(f *os.File, st *unix.Stat_t, shown string) error {
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	n, err := io.ReadFull(f, buf[:])
	whole := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
	if err != nil && !whole {
		return err
	}
	h := header(shown, st, tar.TypeReg)
	h.Size = int64(n)
	if !whole {
		h.Size = max(h.Size, st.Size)
	}
	if err := p.tar.WriteHeader(h); err != nil {
		return err
	}
	if _, err := p.tar.Write(buf[:n]); err != nil {
		return err
	}
	left := h.Size - int64(n)
	if left == 0 {
		return nil
	}
	sent, err := io.CopyBuffer(struct{ io.Writer }{p.tar}, struct{ io.Reader }{io.LimitReader(f, left)}, buf[:])
	if err == nil && sent < left {
		err = errShrunk
	}
	return err
}

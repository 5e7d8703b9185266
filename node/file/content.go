// SPDX-License-Identifier: Apache-2.0

package file

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"io/fs"
	"net/http"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/safefile"
	"opensandbox.io/node/wire"
)

// uploadOffset is the header that says how much of a file has arrived.
const uploadOffset = "Upload-Offset"

// putContent writes one file from the body. Without offset it is there at once or not at all; with offset it gathers
// in a hidden file beside it, which takes its place with final=true.
func (a *API) putContent(w http.ResponseWriter, r *http.Request) error {
	given, err := required(r, "path")
	if err != nil {
		return err
	}
	u, err := readContentQuery(r)
	if err != nil {
		return err
	}
	p, err := a.locate(given, true)
	if err != nil {
		return err
	}
	defer p.Close()
	var told wire.FileContent
	if u.parts {
		told, err = a.receivePart(w, p, u, r.Body)
	} else {
		told, err = receiveWhole(p, u, r.Body)
	}
	var broken *readError
	if errors.As(err, &broken) {
		return reply.Errorf(wire.CodeInvalidFileContent, "%s: the body ends early: %v.", asGiven(given), broken.err)
	}
	if err != nil {
		return explain(given, err)
	}
	told.Path = escape(p.path)
	reply.JSON(w, http.StatusOK, told)
	return nil
}

// contentQuery is what a request says about the file it brings.
type contentQuery struct {
	want   attributes
	parts  bool // offset is given
	offset int64
	final  bool
	sync   bool
	digest []byte // nil: not told
}

func readContentQuery(r *http.Request) (u contentQuery, err error) {
	query := r.URL.Query()
	var permission wire.Permission
	if text := query.Get("mode"); text != "" {
		if permission.Mode, err = strconv.Atoi(text); err != nil {
			return u, reply.Errorf(wire.CodeInvalidQuery, "mode must be a number like 644, not %q.", text)
		}
	}
	owner, group := query.Get("owner"), query.Get("group")
	permission.Owner, permission.Group = &owner, &group
	if u.want, err = wanted(permission, wire.CodeInvalidQuery); err != nil {
		return u, err
	}
	if text := query.Get("offset"); text != "" {
		u.parts = true
		if u.offset, err = strconv.ParseInt(text, 10, 64); err != nil || u.offset < 0 {
			return u, reply.Errorf(wire.CodeInvalidQuery, "offset must be a number from 0 up, not %q.", text)
		}
	}
	if u.final, err = boolean(r, "final", false); err != nil {
		return u, err
	}
	if u.final && !u.parts {
		return u, reply.Errorf(wire.CodeInvalidQuery, "final goes together with offset; without offset each request is a whole file.")
	}
	if u.sync, err = boolean(r, "fsync", false); err != nil {
		return u, err
	}
	u.digest, err = digestOf(r.Header)
	return u, err
}

// digestOf reads the SHA-256 that a client promises: X-Checksum-SHA256 in hex, or RFC 9530's Content-Digest.
func digestOf(h http.Header) ([]byte, error) {
	var digest []byte
	if text := h.Get("X-Checksum-SHA256"); text != "" {
		var err error
		if digest, err = hex.DecodeString(text); err != nil || len(digest) != sha256.Size {
			return nil, reply.Errorf(wire.CodeInvalidQuery, "X-Checksum-SHA256 must be 64 hexadecimal digits.")
		}
	}
	given := strings.Join(h.Values("Content-Digest"), ",")
	if given == "" {
		return digest, nil
	}
	known := false
	for item := range strings.SplitSeq(given, ",") {
		algorithm, text, _ := strings.Cut(strings.TrimSpace(item), "=")
		text, open := strings.CutPrefix(text, ":")
		text, closed := strings.CutSuffix(text, ":")
		other, err := base64.StdEncoding.DecodeString(text)
		if err != nil || !open || !closed || algorithm == "" || algorithm == "sha-256" && len(other) != sha256.Size {
			return nil, reply.Errorf(wire.CodeInvalidQuery, "Content-Digest must be sha-256=:…: with 32 bytes in base64.")
		}
		if algorithm != "sha-256" {
			continue // one beside it that is known is enough
		}
		if digest != nil && string(digest) != string(other) {
			return nil, reply.Errorf(wire.CodeInvalidQuery, "X-Checksum-SHA256 and Content-Digest differ.")
		}
		digest, known = other, true
	}
	if !known {
		return nil, reply.Errorf(wire.CodeInvalidQuery, "Content-Digest names no algorithm that is known here.").
			WithHint("Send sha-256=:…:, or no Content-Digest.")
	}
	return digest, nil
}

// check compares what arrived with what was promised. The hint says what is left and what to do.
func (u *contentQuery) check(got []byte, hint string) error {
	if u.digest == nil || string(got) == string(u.digest) {
		return nil
	}
	return reply.Errorf(wire.CodeInvalidFileContent, "The SHA-256 of what arrived is %x, not %x.", got, u.digest).WithHint("%s", hint)
}

func receiveWhole(p *place, u contentQuery, body io.Reader) (told wire.FileContent, err error) {
	sum := sha256.New()
	err = p.write(u.want, u.sync, func(out io.Writer) (bool, error) {
		n, err := copyHashed(out, body, sum)
		if err != nil {
			return false, err
		}
		told = wire.FileContent{Size: n, SHA256: hex.EncodeToString(sum.Sum(nil))}
		return true, u.check(sum.Sum(nil), "Nothing was changed; send it again.")
	})
	return told, err
}

// copyHashed copies what a client sends.
func copyHashed(out io.Writer, body io.Reader, sum hash.Hash) (int64, error) {
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	return io.CopyBuffer(io.MultiWriter(out, sum), readFrom{body}, buf[:])
}

const partialPrefix = ".osb-partial-"

// partialName is where the parts of a file gather. It is derived, so that a client that comes back finds it.
func (p *place) partialName() string {
	sum := sha256.Sum256([]byte(p.name))
	return partialPrefix + hex.EncodeToString(sum[:12])
}

// partial opens what has arrived so far; nil when there is nothing. A file that others have a hand on is not it:
// whoever may write the directory can put anything there.
func (a *API) partial(p *place) (*os.File, int64, error) {
	f, st, err := safefile.OpenRegular(p.fd(), p.partialName(), unix.O_RDWR|unix.O_NOFOLLOW)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, safefile.ErrNotRegular), err == unix.ELOOP, err == unix.EACCES:
		return nil, 0, nil
	case err != nil:
		return nil, 0, err
	}
	if st.Uid != a.uid || st.Nlink != 1 || st.Mode&0o077 != 0 {
		_ = f.Close()
		return nil, 0, nil
	}
	return f, st.Size, nil
}

// begin makes an empty partial file, in the place of an earlier one.
func (p *place) begin() (*os.File, error) {
	name := p.partialName()
	if err := unix.Unlinkat(p.fd(), name, 0); err != nil && err != unix.ENOENT {
		return nil, err
	}
	fd, err := safefile.Openat(p.fd(), name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// receivePart adds to a partial file at its end, and nowhere else: what is there was told to the client.
func (a *API) receivePart(w http.ResponseWriter, p *place, u contentQuery, body io.Reader) (told wire.FileContent, err error) {
	if err := p.follow(); err != nil {
		return told, err
	}
	old, err := p.existing()
	if err != nil {
		return told, err
	}
	f, err := a.continued(w, p, u.offset)
	if err != nil {
		return told, err
	}
	defer f.Close()
	if _, err := f.Seek(u.offset, io.SeekStart); err != nil {
		return told, err
	}
	sum := sha256.New()
	n, err := copyHashed(f, body, sum)
	if err != nil {
		return told, err // what arrived stays; HEAD tells how much
	}
	told = wire.FileContent{Size: u.offset + n, SHA256: hex.EncodeToString(sum.Sum(nil))}
	if !u.final {
		if err := u.check(sum.Sum(nil), "This part was thrown away, those before it stay; send it again."); err != nil {
			return told, errors.Join(err, f.Truncate(u.offset))
		}
		if u.sync {
			return told, f.Sync()
		}
		return told, nil
	}
	if u.offset > 0 {
		if sum, err = hashed(f, told.Size); err != nil {
			return told, err
		}
		told.SHA256 = hex.EncodeToString(sum.Sum(nil))
	}
	name := p.partialName()
	const hint = "The file is as it was, and all parts were thrown away, since any of them may be wrong; begin anew with offset=0."
	if err := u.check(sum.Sum(nil), hint); err != nil {
		_ = unix.Unlinkat(p.fd(), name, 0) // nobody knows which part is wrong
		return told, err
	}
	if !isStill(f, p.fd(), name) {
		return told, reply.Errorf(wire.CodeUploadConflict, "Another upload of the same file began meanwhile.").
			WithHint("Let one client upload a file at a time.")
	}
	renamed, err := p.exchange(f, name, old, u.want, u.sync)
	if err == nil && !renamed {
		err = unix.Unlinkat(p.fd(), name, 0)
	}
	return told, err
}

// continued opens the partial file that ends at this offset, for this client alone.
func (a *API) continued(w http.ResponseWriter, p *place, offset int64) (*os.File, error) {
	f, size, err := a.partial(p)
	if err != nil {
		return nil, err
	}
	if f != nil && unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		_ = f.Close()
		w.Header().Set(uploadOffset, strconv.FormatInt(size, 10))
		return nil, reply.Errorf(wire.CodeUploadConflict, "Another request writes the same file.").
			WithHint("Let it end, ask HEAD /files/content how much has arrived, and go on from there.")
	}
	if offset == 0 {
		if f != nil {
			_ = f.Close()
		}
		if f, err = p.begin(); err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = f.Close()
			return nil, err
		}
		return f, nil
	}
	if f != nil {
		var st unix.Stat_t // again: it may have grown before the lock
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			_ = f.Close()
			return nil, err
		}
		if size = st.Size; size == offset {
			return f, nil
		}
		_ = f.Close()
	}
	w.Header().Set(uploadOffset, strconv.FormatInt(size, 10))
	return nil, reply.Errorf(wire.CodeUploadConflict, "%d bytes have arrived, so the next part begins there and not at %d.", size, offset).
		WithHint("Send the part with offset=%d.", size)
}

// hashed reads a file from its beginning.
func hashed(f *os.File, size int64) (hash.Hash, error) {
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	sum := sha256.New()
	_, err := io.CopyBuffer(sum, struct{ io.Reader }{io.NewSectionReader(f, 0, size)}, buf[:])
	return sum, err
}

// isStill is true when a name is that of the open file.
func isStill(f *os.File, dir int, name string) bool {
	var open, named unix.Stat_t
	return unix.Fstat(int(f.Fd()), &open) == nil && unix.Fstatat(dir, name, &named, unix.AT_SYMLINK_NOFOLLOW) == nil &&
		open.Ino == named.Ino && open.Dev == named.Dev
}

// headContent tells how much of a file has arrived in parts.
func (a *API) headContent(w http.ResponseWriter, r *http.Request) error {
	given, err := required(r, "path")
	if err != nil {
		return err
	}
	size := int64(0)
	p, err := a.locate(given, false)
	switch {
	case missing(err): // its directory comes with the first part
	case err != nil:
		return err
	default:
		defer p.Close()
		if err := p.follow(); err != nil {
			return explain(given, err)
		}
		f, n, err := a.partial(p)
		if err != nil {
			return explain(given, err)
		}
		if f != nil {
			_ = f.Close()
			size = n
		}
	}
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set(uploadOffset, strconv.FormatInt(size, 10))
	return done(w)
}

// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bytes"
	"io"
	"mime"
	"net/http"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/safefile"
	"opensandbox.io/node/wire"
)

var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// download sends a file, a byte range of it, or some of its lines.
func (a *API) download(w http.ResponseWriter, r *http.Request) error {
	given, err := required(r, "path")
	if err != nil {
		return err
	}
	offset, lines1, err := positive(r, "offset")
	if err != nil {
		return err
	}
	limit, lines2, err := positive(r, "limit")
	if err != nil {
		return err
	}
	window := lines1 || lines2
	ranges := r.Header.Get("Range")
	if window && ranges != "" {
		return reply.Errorf(wire.CodeInvalidQuery, "offset and limit count lines and do not go together with Range.")
	}
	p, err := a.locate(given, false)
	if err != nil {
		return err
	}
	defer p.Close()
	f, st, err := safefile.OpenRegular(p.fd(), p.name, unix.O_RDONLY)
	if err != nil {
		return explain(given, err)
	}
	defer f.Close()
	h := w.Header()
	h.Set("X-Content-Type-Options", "nosniff")
	if window {
		h.Set("Content-Type", "text/plain; charset=utf-8")
		if !lines1 {
			offset = 1
		}
		return sendLines(w, f, offset, limit)
	}
	from, to := int64(0), st.Size
	status := http.StatusOK
	if ranges != "" {
		var ok bool
		if from, to, ok = parseRange(ranges, st.Size); !ok {
			h.Set("Content-Range", "bytes */"+strconv.FormatInt(st.Size, 10))
			return reply.Errorf(wire.CodeInvalidRange, "Range %q does not fit a file of %d bytes.", ranges, st.Size)
		}
		h.Set("Content-Range", "bytes "+strconv.FormatInt(from, 10)+"-"+strconv.FormatInt(to-1, 10)+"/"+strconv.FormatInt(st.Size, 10))
		status = http.StatusPartialContent
	}
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Accept-Ranges", "bytes")
	h.Set("Content-Length", strconv.FormatInt(to-from, 10))
	h.Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": asGiven(path.Base(p.path))}))
	w.WriteHeader(status)
	if r.Method == http.MethodHead {
		return nil
	}
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	// Without the writer's own ReadFrom, which would take small bites on a Unix socket.
	_, err = io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{io.NewSectionReader(f, from, to-from)}, buf[:])
	if err != nil {
		panic(http.ErrAbortHandler) // the length has been promised
	}
	return nil
}

func positive(r *http.Request, name string) (n int64, given bool, err error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return 0, false, nil
	}
	if n, err = strconv.ParseInt(text, 10, 64); err != nil || n < 1 {
		return 0, true, reply.Errorf(wire.CodeInvalidQuery, "%s must be a number from 1 up, not %q.", name, text)
	}
	return n, true, nil
}

// parseRange reads bytes=a-b, bytes=a- and bytes=-n; of several ranges the first counts. to is exclusive.
func parseRange(text string, size int64) (from, to int64, ok bool) {
	spec, found := strings.CutPrefix(strings.TrimSpace(text), "bytes=")
	if !found {
		return 0, 0, false
	}
	spec, _, _ = strings.Cut(spec, ",")
	first, last, found := strings.Cut(strings.TrimSpace(spec), "-")
	if !found {
		return 0, 0, false
	}
	if first == "" {
		n, err := strconv.ParseUint(last, 10, 63)
		if err != nil || n == 0 || size == 0 {
			return 0, 0, false
		}
		return max(0, size-int64(n)), size, true
	}
	a, err := strconv.ParseUint(first, 10, 63)
	if err != nil || int64(a) >= size {
		return 0, 0, false
	}
	if last == "" {
		return int64(a), size, true
	}
	b, err := strconv.ParseUint(last, 10, 63)
	if err != nil || b < a {
		return 0, 0, false
	}
	return int64(a), min(int64(min(b, 1<<62))+1, size), true
}

// sendLines sends lines from the offset-th on, limit of them (0: all), joined by \n, without one at the end and
// without a \r before it. Lines are never held: one may be as large as the file.
func sendLines(w http.ResponseWriter, f *os.File, offset, limit int64) error {
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	l := lineWindow{w: w, skip: offset - 1, left: limit, all: limit == 0}
	for {
		n, err := f.Read(buf[:])
		if n > 0 {
			more, writeErr := l.feed(buf[:n])
			if writeErr != nil || !more {
				return nil
			}
		}
		if err == io.EOF {
			l.close()
			return nil
		}
		if err != nil {
			if l.wrote {
				panic(http.ErrAbortHandler)
			}
			return explain(f.Name(), err)
		}
	}
}

type lineWindow struct {
	w       io.Writer
	skip    int64
	left    int64
	all     bool
	newline bool // a line has ended; \n comes before the next one, if there is one
	cr      bool // a \r is held back; it goes only if no \n follows
	wrote   bool
}

func (l *lineWindow) feed(data []byte) (more bool, err error) {
	for len(data) > 0 {
		end := bytes.IndexByte(data, '\n')
		if l.skip > 0 {
			if end < 0 {
				return true, nil
			}
			data = data[end+1:]
			l.skip--
			continue
		}
		if l.newline {
			if err := l.write([]byte{'\n'}); err != nil {
				return false, err
			}
			l.newline = false
		}
		piece := data
		if end >= 0 {
			piece = data[:end]
		}
		if l.cr && (end != 0) {
			if err := l.write([]byte{'\r'}); err != nil {
				return false, err
			}
		}
		l.cr = false
		if n := len(piece); n > 0 && piece[n-1] == '\r' {
			piece, l.cr = piece[:n-1], end < 0
		}
		if err := l.write(piece); err != nil {
			return false, err
		}
		if end < 0 {
			return true, nil
		}
		data = data[end+1:]
		l.newline = true
		if l.left--; l.left == 0 && !l.all {
			return false, nil
		}
	}
	return true, nil
}

// close sends a \r that turned out to be the last byte of the file.
func (l *lineWindow) close() {
	if l.cr {
		_ = l.write([]byte{'\r'})
	}
}

func (l *lineWindow) write(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	l.wrote = true
	_, err := l.w.Write(p)
	return err
}

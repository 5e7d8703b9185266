// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/wire"
)

func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// content sends a file, or a part of one.
func (b *bench) content(name, text string, more ...string) (int, http.Header, wire.FileContent, string) {
	b.Helper()
	status, h, body := b.call("PUT", "/files/content", q(append([]string{"path", b.path(name)}, more...)...), strings.NewReader(text))
	var told wire.FileContent
	if status == 200 {
		if err := json.Unmarshal([]byte(body), &told); err != nil {
			b.Fatalf("%v in %s", err, body)
		}
	}
	return status, h, told, body
}

func (b *bench) arrived(name string) string {
	b.Helper()
	status, h, _ := b.call("HEAD", "/files/content", q("path", b.path(name)), nil)
	if status != 200 {
		b.Fatalf("HEAD: %d", status)
	}
	return h.Get("Upload-Offset")
}

func (b *bench) entries() []string {
	b.Helper()
	list, err := os.ReadDir(b.dir)
	if err != nil {
		b.Fatal(err)
	}
	names := []string{}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

func TestContentIsWrittenAtOnce(t *testing.T) {
	b := newBench(t)
	status, _, told, body := b.content("a/b", "hello", "mode", "600", "fsync", "true")
	if status != 200 || told.Path != b.path("a/b") || told.Size != 5 || told.SHA256 != digest("hello") {
		t.Fatalf("%d %s", status, body)
	}
	if st, err := os.Stat(b.path("a/b")); err != nil || st.Mode() != 0o600 || b.get("a/b") != "hello" {
		t.Errorf("%v %v", st, err)
	}
	for name, c := range map[string]struct {
		query, header []string
		code          string
	}{
		"digest":        {nil, []string{"X-Checksum-SHA256", digest("other")}, "INVALID_FILE_CONTENT"},
		"content":       {nil, []string{"Content-Digest", "sha-256=:" + base64.StdEncoding.EncodeToString(make([]byte, 32)) + ":"}, "INVALID_FILE_CONTENT"},
		"not a digest":  {nil, []string{"X-Checksum-SHA256", "abc"}, "INVALID_QUERY"},
		"not base64":    {nil, []string{"Content-Digest", "sha-256=abc"}, "INVALID_QUERY"},
		"two digests":   {nil, []string{"X-Checksum-SHA256", digest("new"), "Content-Digest", "sha-256=:" + base64.StdEncoding.EncodeToString(make([]byte, 32)) + ":"}, "INVALID_QUERY"},
		"offset":        {[]string{"offset", "-1"}, nil, "INVALID_QUERY"},
		"final alone":   {[]string{"final", "true"}, nil, "INVALID_QUERY"},
		"mode":          {[]string{"mode", "999"}, nil, "INVALID_QUERY"},
		"owner":         {[]string{"owner", "no-such-user"}, nil, "INVALID_QUERY"},
		"not a boolean": {[]string{"fsync", "perhaps"}, nil, "INVALID_QUERY"},
		"nothing there": {[]string{"offset", "3"}, nil, "UPLOAD_CONFLICT"},
	} {
		status, _, body := b.call("PUT", "/files/content", q(append([]string{"path", b.path("a/b")}, c.query...)...), strings.NewReader("new"), c.header...)
		if status < 400 || !strings.Contains(body, c.code) || b.get("a/b") != "hello" {
			t.Errorf("%s: %d %s", name, status, body)
		}
	}
	sum := sha256.Sum256([]byte("new"))
	status, _, body = b.call("PUT", "/files/content", q("path", b.path("a/b")), strings.NewReader("new"),
		"X-Checksum-SHA256", digest("new"), "Content-Digest", "md5=:AA==:, sha-256=:"+base64.StdEncoding.EncodeToString(sum[:])+":")
	if status != 200 || b.get("a/b") != "new" {
		t.Errorf("%d %s", status, body)
	}
	if list, _ := os.ReadDir(b.path("a")); len(list) != 1 {
		t.Errorf("left behind: %v", list)
	}
	if status, _, _ := b.call("PUT", "/files/content", nil, strings.NewReader("x")); status != 400 {
		t.Errorf("no path: %d", status)
	}
}

func TestContentInParts(t *testing.T) {
	b := newBench(t)
	b.put("f", "old")
	if n := b.arrived("f"); n != "0" {
		t.Errorf("arrived %s", n)
	}
	if n := b.arrived("not/yet"); n != "0" {
		t.Errorf("arrived %s", n)
	}
	if status, _, told, body := b.content("f", "hello ", "offset", "0"); status != 200 || told.Size != 6 || told.SHA256 != digest("hello ") {
		t.Fatalf("%d %s", status, body)
	}
	if b.get("f") != "old" || b.arrived("f") != "6" {
		t.Errorf("%q, %s arrived", b.get("f"), b.arrived("f"))
	}
	for _, offset := range []string{"3", "7", "99999999999"} {
		if status, h, _, body := b.content("f", "x", "offset", offset, "final", "true"); status != 409 || h.Get("Upload-Offset") != "6" {
			t.Errorf("at %s: %d %s", offset, status, body)
		}
	}
	// A part that arrived wrong is not kept.
	status, _, body := b.call("PUT", "/files/content", q("path", b.path("f"), "offset", "6"), strings.NewReader("wrong"), "X-Checksum-SHA256", digest("right"))
	if status != 400 || b.arrived("f") != "6" {
		t.Errorf("%d %s", status, body)
	}
	status, _, body = b.call("PUT", "/files/content", q("path", b.path("f"), "offset", "6", "final", "true", "fsync", "true"), strings.NewReader("world"), "X-Checksum-SHA256", digest("hello world"))
	if status != 200 || !strings.Contains(body, digest("hello world")) || b.get("f") != "hello world" {
		t.Errorf("%d %s", status, body)
	}
	if left := b.entries(); len(left) != 1 || b.arrived("f") != "0" {
		t.Errorf("left behind: %v", left)
	}
	// A file that is wrong as a whole is thrown away.
	b.content("f", "one", "offset", "0")
	status, _, body = b.call("PUT", "/files/content", q("path", b.path("f"), "offset", "3", "final", "true"), strings.NewReader("two"), "X-Checksum-SHA256", digest("three"))
	if status != 400 || b.arrived("f") != "0" || b.get("f") != "hello world" {
		t.Errorf("%d %s", status, body)
	}
	// offset 0 begins anew, and may be all.
	b.content("f", "abandoned", "offset", "0")
	if status, _, told, body := b.content("f", "", "offset", "0", "final", "true"); status != 200 || told.Size != 0 || b.get("f") != "" {
		t.Errorf("%d %s", status, body)
	}
}

// A connection that breaks leaves what has arrived, and the client goes on from there.
func TestBrokenPartIsResumed(t *testing.T) {
	b := newBench(t)
	r, w := io.Pipe()
	req, _ := http.NewRequest("PUT", b.url+"/files/content?"+q("path", b.path("f"), "offset", "0").Encode(), r)
	failed := make(chan struct{})
	go func() {
		defer close(failed)
		if res, err := b.c.Do(req); err == nil {
			res.Body.Close()
		}
	}()
	_, _ = w.Write(bytes.Repeat([]byte("x"), 1<<20))
	w.CloseWithError(io.ErrUnexpectedEOF)
	<-failed
	b.c.CloseIdleConnections()
	// The lock is free when the server has noticed.
	var status int
	var n string
	eventually(t, func() bool {
		n = b.arrived("f")
		status, _, _, _ = b.content("f", "end", "offset", n, "final", "true")
		return status == 200
	})
	if got := b.get("f"); fmt.Sprint(len(got)-3) != n || strings.Trim(got, "x") != "end" {
		t.Errorf("%d bytes after %s", len(got), n)
	}
}

// Whoever may write the directory can prepare the hidden file. It is neither written through nor taken for ours.
func TestPlantedPartials(t *testing.T) {
	b := newBench(t)
	victim := b.put("victim", "precious")
	hidden := filepath.Join(b.dir, (&place{name: "f"}).partialName())
	for name, plant := range map[string]func() error{
		"symlink":  func() error { return os.Symlink(victim, hidden) },
		"link":     func() error { return os.Link(victim, hidden) },
		"fifo":     func() error { return unix.Mkfifo(hidden, 0o600) },
		"dangling": func() error { return os.Symlink(b.path("created"), hidden) },
		"open":     func() error { return os.WriteFile(hidden, []byte("precious"), 0o666) },
	} {
		if err := plant(); err != nil {
			t.Fatal(err)
		}
		if n := b.arrived("f"); n != "0" {
			t.Errorf("%s: %s arrived", name, n)
		}
		if status, _, _, body := b.content("f", "x", "offset", "8", "final", "true"); status != 409 {
			t.Errorf("%s: %d %s", name, status, body)
		}
		if status, _, _, body := b.content("f", "mine", "offset", "0", "final", "true"); status != 200 || b.get("f") != "mine" {
			t.Errorf("%s: %d %s", name, status, body)
		}
		if b.get("victim") != "precious" {
			t.Fatalf("%s: written through", name)
		}
		if left := b.entries(); len(left) != 2 {
			t.Errorf("%s: left behind: %v", name, left)
		}
	}
	if err := os.Mkdir(hidden, 0o755); err != nil {
		t.Fatal(err)
	}
	if status, _, _, body := b.content("f", "x", "offset", "0"); status != 400 {
		t.Errorf("directory: %d %s", status, body)
	}
}

// Two clients that upload the same file do not mix it.
func TestTwoUploadsOfOneFile(t *testing.T) {
	b := newBench(t)
	b.content("f", "abc", "offset", "0")
	hold, err := os.OpenFile(filepath.Join(b.dir, (&place{name: "f"}).partialName()), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Close()
	if err := unix.Flock(int(hold.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if status, _, _, body := b.content("f", "def", "offset", "3"); status != 409 || !strings.Contains(body, "Another request") {
		t.Errorf("%d %s", status, body)
	}
}

// generator gives a stream that is nowhere held.
type generator struct{ left int64 }

func (g *generator) Read(p []byte) (int, error) {
	if g.left == 0 {
		return 0, io.EOF
	}
	n := min(int64(len(p)), g.left)
	g.left -= n
	return int(n), nil
}

// heap runs f and gives by how much the heap was larger than before, at most, at the times f asks.
func heap(f func(sample func())) int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	before, most := int64(m.HeapAlloc), atomic.Int64{}
	f(func() {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		if n := int64(m.HeapAlloc) - before; n > most.Load() {
			most.Store(n)
		}
	})
	return most.Load()
}

// sampled calls f every 64 MiB.
type sampled struct {
	io.Reader
	n int64
	f func()
}

func (s *sampled) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	if s.n>>26 != (s.n+int64(n))>>26 {
		s.f()
	}
	s.n += int64(n)
	return n, err
}

func TestLargeFilesMoveInConstantMemory(t *testing.T) {
	const down, up, most = 2 << 30, 256 << 20, 24 << 20
	b := newBench(t)
	f, err := os.Create(b.path("sparse"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(down); err != nil {
		t.Fatal(err)
	}
	for _, route := range []string{"/files/download", "/files/tar"} {
		grown := heap(func(sample func()) {
			res, err := b.c.Get(b.url + route + "?" + q("path", b.path("sparse")).Encode())
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			if n, err := io.Copy(io.Discard, &sampled{Reader: res.Body, f: sample}); err != nil || n < down {
				t.Errorf("%s: %d bytes, %v", route, n, err)
			}
		})
		if grown > most {
			t.Errorf("%s: the heap grew by %d bytes", route, grown)
		}
	}
	for _, query := range [][]string{{}, {"offset", "0", "final", "true"}} {
		grown := heap(func(sample func()) {
			req, _ := http.NewRequest("PUT", b.url+"/files/content?"+q(append(query, "path", b.path("up"))...).Encode(), &sampled{Reader: &generator{up}, f: sample})
			res, err := b.c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			body, _ := io.ReadAll(res.Body)
			if res.StatusCode != 200 || !strings.Contains(string(body), fmt.Sprint(up)) {
				t.Errorf("%d %s", res.StatusCode, body)
			}
		})
		if grown > most {
			t.Errorf("PUT %v: the heap grew by %d bytes", query, grown)
		}
	}
}

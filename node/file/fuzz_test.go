// SPDX-License-Identifier: Apache-2.0

package file

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/safefile"
	"opensandbox.io/node/wire"
)

// FuzzLocate: whatever is given as a path, what is found is outside of /proc, nothing waits and nothing is made.
func FuzzLocate(f *testing.F) {
	for _, seed := range []string{
		"/", ".", "..", "a/b", "~/x", "$DIR/a", "${DIR}/../..", "link/x", "link/..", "loop/x", "proc/self/fd/0", "/proc/self/root/etc", "fifo", "fifo/x",
		"/proc/../etc", "//a//b//", "a\x00b", "%FF", "x%25FF", strings.Repeat("a/", 3000), strings.Repeat("n", 300), "dead", "dead/x", "\xff/\xfe",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, given string) {
		dir := planted(t)
		a := New([]string{"HOME=" + dir, "DIR=" + dir}, dir)
		before := inventoryNames(t, dir)
		p, err := a.locate(given, false)
		if err != nil {
			if _, ok := err.(*reply.Fault); !ok {
				t.Fatalf("%q: not an answer: %v", given, err)
			}
			return
		}
		defer p.Close()
		if safefile.CheckNotProc(p.fd()) != nil || p.name == "" || p.name == ".." || strings.ContainsAny(p.name, "/\x00") {
			t.Fatalf("%q leads to %q in /proc or elsewhere", given, p.name)
		}
		if file, _, err := safefile.OpenRegular(p.fd(), p.name, unix.O_RDONLY); err == nil {
			_ = file.Close()
		}
		if err := p.follow(); err == nil && safefile.CheckNotProc(p.fd()) != nil {
			t.Fatalf("%q follows into /proc", given)
		}
		fd, err := safefile.OpenBeneath(int(mustOpen(t, dir).Fd()), given, unix.O_PATH|unix.O_NOFOLLOW, 0)
		if err == nil {
			defer unix.Close(fd)
			at, _ := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
			if at != dir && !strings.HasPrefix(at, dir+"/") {
				t.Fatalf("%q got out to %q", given, at)
			}
		}
		if after := inventoryNames(t, dir); after != before {
			t.Fatalf("%q changed the tree: %s", given, after)
		}
	})
}

func mustOpen(t *testing.T, dir string) *os.File {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// planted makes a tree with what programs like to plant.
func planted(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, err := range []error{
		os.MkdirAll(filepath.Join(dir, "a/b"), 0o755), os.Symlink("/", filepath.Join(dir, "link")), os.Symlink("loop", filepath.Join(dir, "loop")),
		os.Symlink("/proc", filepath.Join(dir, "proc")), os.Symlink("none", filepath.Join(dir, "dead")), unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600),
		os.WriteFile(filepath.Join(dir, "x"), []byte("x"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// FuzzUnpack: no archive writes outside of its directory, and each ends in an answer.
func FuzzUnpack(f *testing.F) {
	for _, items := range [][]item{
		{regular("a", "text"), entry(tar.TypeDir, "d/", ""), regular("d/e/f", "x"), entry(tar.TypeLink, "h", "a"), entry(tar.TypeSymlink, "l", "..")},
		{entry(tar.TypeSymlink, "l", ".."), regular("l/x", "x")},
		{regular("../x", "x")}, {regular("/x", "x")}, {entry(tar.TypeLink, "h", "../x")}, {entry(tar.TypeFifo, "f", "")},
		{regular(strings.Repeat("long/", 60)+"n", "x")},
	} {
		data := archive(f, items...)
		f.Add(data)
		f.Add(zipped(data))
	}
	f.Add([]byte("\x1f\x8b"))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := planted(t)
		target := filepath.Join(dir, "a")
		outside := func() string {
			all := inventoryNames(t, dir)
			var kept []string
			for name := range strings.SplitSeq(all, " ") {
				if name != "a" && !strings.HasPrefix(name, "a/") {
					kept = append(kept, name)
				}
			}
			text, err := os.ReadFile(filepath.Join(dir, "x"))
			return strings.Join(kept, " ") + string(text) + errorText(err)
		}
		before := outside()
		root := mustOpen(t, target)
		x := &unpacker{root: root}
		// A bomb may be as large as it likes; here there is only so much room.
		err := x.extract(context.Background(), io.LimitReader(readFrom{bytes.NewReader(data)}, 64<<10))
		x.leave()
		if err != nil {
			if _, ok := x.explain(target, err).(*reply.Fault); !ok {
				t.Fatalf("not an answer: %v", err)
			}
		}
		_ = unix.Chmod(target, 0o755)
		if after := outside(); after != before {
			t.Fatalf("outside %q became %q", before, after)
		}
		if left, _ := filepath.Glob(filepath.Join(target, temporaryPrefix+"*")); len(left) > 0 && !bytes.Contains(data, []byte(temporaryPrefix)) && len(data) < 512 {
			t.Fatalf("left behind: %v", left)
		}
	})
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// FuzzUpload: no multipart body gets anything but an answer, and half a file is never seen.
func FuzzUpload(f *testing.F) {
	part := func(name, text string) string {
		return "--B\r\nContent-Disposition: form-data; name=\"" + name + "\"; filename=\"x\"\r\n\r\n" + text + "\r\n"
	}
	for _, seed := range []string{
		part("metadata", `{"path":"f","mode":644}`) + part("file", "text") + "--B--\r\n",
		part("metadata", `{"path":"f"}`) + part("metadata", `{"path":"g","owner":"root","group":"0"}`) + part("file", "1") + part("file", "2") + "--B--\r\n",
		part("file", "x") + "--B--\r\n", part("metadata", `{"path":"f"}`) + "--B--\r\n", part("other", "x"), "--B", "",
		part("metadata", `{"path":"../f","mode":9999}`) + part("file", "x") + "--B--", part("metadata", `{"path":"/proc/self/mem"}`) + part("file", "x"),
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := planted(t)
		mux := http.NewServeMux()
		New([]string{"HOME=" + dir}, dir).Routes(mux)
		r := httptest.NewRequest("POST", "/files/upload", bytes.NewReader(data))
		r.Header.Set("Content-Type", "multipart/form-data; boundary=B")
		w := httptest.NewRecorder()
		reply.Handle(mux, nil, wire.CodeUnknown).ServeHTTP(w, r)
		if w.Code != 200 && (w.Code < 400 || !strings.Contains(w.Body.String(), `"code"`)) || strings.Contains(w.Body.String(), `"UNKNOWN"`) {
			t.Fatalf("%d %s", w.Code, w.Body)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, temporaryPrefix+"*")); len(left) > 0 && !bytes.Contains(data, []byte(temporaryPrefix)) {
			t.Fatalf("left behind: %v", left)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package file

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/wire"
)

// eventually waits for what another party does in its own time.
func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it does not happen")
		}
	}
}

type item struct {
	tar.Header
	text string
}

func regular(name, text string) item {
	return item{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}, text}
}

func entry(kind byte, name, link string) item {
	return item{tar.Header{Typeflag: kind, Name: name, Linkname: link, Mode: 0o755}, ""}
}

// archive makes a tar of entries as they are, however wrong.
func archive(t testing.TB, items ...item) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, i := range items {
		h := i.Header
		h.Size = int64(len(i.text))
		h.Uid, h.Gid = max(h.Uid, os.Getuid()), max(h.Gid, os.Getgid())
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, i.text); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// patched changes bytes of the first header and makes its checksum right again.
func patched(data []byte, at int, with string) []byte {
	copy(data[at:], with)
	copy(data[148:], "        ")
	sum := 0
	for _, c := range data[:512] {
		sum += int(c)
	}
	copy(data[148:], fmt.Sprintf("%06o\x00 ", sum))
	return data
}

func zipped(data []byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, _ = w.Write(data)
	_ = w.Close()
	return out.Bytes()
}

func (b *bench) unpack(name string, data []byte, more ...string) (int, string) {
	b.Helper()
	status, _, body := b.call("POST", "/files/tar", q(append([]string{"path", b.path(name)}, more...)...), bytes.NewReader(data))
	return status, body
}

// A tree comes back as it was: modes, links of both kinds, empty directories, times, owners, odd names.
func TestTarThereAndBack(t *testing.T) {
	for _, gz := range []string{"false", "true"} {
		b := newBench(t)
		long := strings.Repeat("long/", 40) + strings.Repeat("n", 200)
		b.put("tree/sub/a", "aaa")
		b.put("tree/"+long, "deep")
		b.put("tree/big", strings.Repeat("0123456789abcdef", 40_000))
		b.put("tree/ünï \xff\n", "odd")
		for _, err := range []error{
			os.Symlink("../anywhere", b.path("tree/link")),
			os.Link(b.path("tree/sub/a"), b.path("tree/zweit")),
			os.Mkdir(b.path("tree/empty"), 0o700),
			unix.Mkfifo(b.path("tree/fifo"), 0o600),
			unix.Chmod(b.path("tree/sub/a"), 0o4751),
			unix.Chmod(b.path("tree/sub"), 0o555),
			os.Chtimes(b.path("tree/big"), time.Time{}, time.Unix(1000, 123456789)),
			os.Chtimes(b.path("tree/sub"), time.Time{}, time.Unix(2000, 5)),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
		if os.Getuid() == 0 {
			for _, name := range []string{"tree/big", "tree/link", "tree/empty"} {
				if err := os.Lchown(b.path(name), 1234, 2345); err != nil {
					t.Fatal(err)
				}
			}
		}
		res, err := b.c.Get(b.url + "/files/tar?" + q("path", b.path("tree"), "gzip", gz).Encode())
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || res.StatusCode != 200 || res.Trailer.Get("X-Tar-Skipped") != "1" {
			t.Fatalf("%d %v %v", res.StatusCode, err, res.Trailer)
		}
		status, body := b.unpack("copy/of it", data)
		var told wire.TarResult
		if json.Unmarshal([]byte(body), &told) != nil || status != 200 || told.Path != b.path("copy/of it") || told.Entries < 40 || told.Bytes < 640_000 {
			t.Fatalf("%d %s", status, body)
		}
		if err := os.Remove(b.path("tree/fifo")); err != nil {
			t.Fatal(err)
		}
		if want, got := inventory(t, b.path("tree")), inventory(t, b.path("copy/of it")); want != got {
			t.Errorf("gzip=%s\n%s\nbecame\n%s", gz, want, got)
		}
		if !same(t, b.path("copy/of it/sub/a"), b.path("copy/of it/zweit")) {
			t.Error("the hard link is a file of its own")
		}
	}
}

func same(t *testing.T, a, b string) bool {
	t.Helper()
	x, err1 := os.Lstat(a)
	y, err2 := os.Lstat(b)
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	return os.SameFile(x, y)
}

// inventory writes down everything that an archive keeps of a tree.
func inventory(t *testing.T, root string) string {
	t.Helper()
	var out strings.Builder
	err := filepath.Walk(root, func(p string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		text := ""
		switch {
		case info.Mode().IsRegular():
			data, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			text = digest(string(data))
		case info.Mode()&os.ModeSymlink != 0:
			text, _ = os.Readlink(p)
		}
		at := info.ModTime().UnixNano()
		if p == root {
			at = 0 // the FIFO was removed from one of them
		}
		line, _ := json.Marshal([]any{strings.TrimPrefix(p, root), st.Mode, st.Uid, st.Gid, at, text})
		out.Write(append(line, '\n'))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestTarOfOneFileAndOfNothing(t *testing.T) {
	b := newBench(t)
	p := b.put("f", "text")
	_, h, body := b.call("GET", "/files/tar", q("path", p), nil)
	r := tar.NewReader(strings.NewReader(body))
	head, err := r.Next()
	if err != nil || head.Name != "f" || h.Get("Content-Type") != "application/x-tar" {
		t.Fatalf("%v %v %v", head, err, h)
	}
	if err := unix.Mkfifo(b.path("fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(b.dir, b.path("link")); err != nil {
		t.Fatal(err)
	}
	for given, code := range map[string]string{
		b.path("none"): "FILE_NOT_FOUND", b.path("fifo"): "INVALID_FILE", b.path("link"): "INVALID_FILE", "/proc": "NOT_SUPPORTED",
		"/proc/self": "NOT_SUPPORTED", "/proc/self/root": "", "/dev/null": "INVALID_FILE",
	} {
		if status, h, body := b.call("GET", "/files/tar", q("path", given), nil); status < 400 || !strings.Contains(body, code) || h.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %d %s", given, status, body)
		}
	}
}

// A file that becomes shorter while it is sent ends the connection, never in an archive that looks whole.
func TestTarOfAFileThatShrinks(t *testing.T) {
	b := newBench(t)
	f, err := os.Create(b.path("f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(256 << 20); err != nil {
		t.Fatal(err)
	}
	res, err := b.c.Get(b.url + "/files/tar?" + q("path", b.dir).Encode())
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	// So much does not fit in between: the server still waits for us when the file shrinks.
	if _, err := io.ReadFull(res.Body, make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, res.Body); err == nil {
		t.Errorf("the archive ended well after %d bytes", n)
	}
}

func TestHostileArchives(t *testing.T) {
	withSparse := bytes.ReplaceAll(archive(t, item{tar.Header{Typeflag: tar.TypeReg, Name: "s", Format: tar.FormatPAX, PAXRecords: map[string]string{"XXX.sparse.major": "1"}}, "0\n"}),
		[]byte("XXX.sparse.major"), []byte("GNU.sparse.major"))
	huge := patched(archive(t, regular("huge", "")), 124, "\x80\x00\x00\x00\x7f\xff\xff\xff\xff\xff\xff\xff") // eight exbibytes
	bomb := patched(archive(t, regular("b", strings.Repeat("z", 2<<20))), 156, "x")                           // records that are to be held in memory
	for name, c := range map[string]struct {
		data []byte
		why  string
	}{
		"dots":                  {archive(t, regular("../out", "x")), ".."},
		"dots inside":           {archive(t, regular("a/../../out", "x")), ".."},
		"harmless dots":         {archive(t, regular("a/../b", "x")), ".."},
		"absolute":              {archive(t, regular("/out", "x")), "absolute"},
		"through a link":        {archive(t, entry(tar.TypeSymlink, "l", ".."), regular("l/out", "x")), "below a link"},
		"through a far link":    {archive(t, entry(tar.TypeSymlink, "l", "/"), regular("l/tmp/out", "x")), "below a link"},
		"directory over a link": {archive(t, entry(tar.TypeSymlink, "l", ".."), entry(tar.TypeDir, "l/", ""), regular("l/out", "x")), "not a directory"},
		"below a file":          {archive(t, regular("f", "x"), regular("f/out", "x")), "not a directory"},
		"hard link outside":     {archive(t, entry(tar.TypeLink, "h", "../secret")), ".."},
		"hard link absolute":    {archive(t, entry(tar.TypeLink, "h", "/etc/passwd")), "absolute"},
		"hard link by a link":   {archive(t, entry(tar.TypeSymlink, "l", ".."), entry(tar.TypeLink, "h", "l/secret")), "below a link"},
		"hard link to a link":   {archive(t, entry(tar.TypeSymlink, "l", "../secret"), entry(tar.TypeLink, "h", "l"), regular("h", "x")), "symbolic link"},
		"hard link to nothing":  {archive(t, entry(tar.TypeLink, "h", "none")), "not there"},
		"hard link to a dir":    {archive(t, entry(tar.TypeDir, "d/", ""), entry(tar.TypeLink, "h", "d")), "cannot be linked"},
		"device":                {archive(t, entry(tar.TypeChar, "null", "")), "device"},
		"block device":          {archive(t, entry(tar.TypeBlock, "sda", "")), "device"},
		"fifo":                  {archive(t, entry(tar.TypeFifo, "fifo", "")), "FIFO"},
		"sparse":                {withSparse, "sparse"},
		"huge":                  {huge, "ends early"},
		"bomb":                  {bomb, "not a tar"},
		"empty name":            {archive(t, item{tar.Header{Typeflag: tar.TypeReg, Mode: 0o644}, "x"}), "empty"},
		"file as root":          {archive(t, regular(".", "x")), "itself"},
		"file over directory":   {archive(t, regular("d/f", "x"), regular("d", "x")), "directory has its name"},
		"name too long":         {archive(t, regular(strings.Repeat("n", 300), "x")), "too long"},
		"path too long":         {archive(t, regular(strings.Repeat("n/", 3000)+"n", "x")), "longer than"},
		"no link":               {archive(t, entry(tar.TypeSymlink, "l", "")), "link to nothing"},
		"garbage":               {bytes.Repeat([]byte("garbage "), 100), "not a tar"},
		"cut":                   {archive(t, regular("a", "x"), regular("b", strings.Repeat("x", 5000)))[:2000], "ends early"},
		"cut gzip":              {zipped(archive(t, regular("a", "x")))[:40], "ends early"},
		"garbage in gzip":       {zipped(bytes.Repeat([]byte("garbage "), 100)), "not a tar"},
		"much after it":         {append(archive(t, regular("a", "x")), make([]byte, 2<<20)...), "follow the end"},
	} {
		b := newBench(t)
		b.put("secret", "precious")
		status, body := b.unpack("target", c.data)
		if status != 400 || !strings.Contains(body, c.why) || !strings.Contains(body, "stay") {
			t.Errorf("%s: %d %s", name, status, body)
		}
		if left := b.entries(); len(left) != 2 || b.get("secret") != "precious" {
			t.Errorf("%s: it got out: %v", name, left)
		}
		if _, err := os.Lstat("/tmp/out"); err == nil {
			t.Errorf("%s: it got out to /tmp", name)
		}
		if hidden, _ := filepath.Glob(b.path("target/.execd-*")); len(hidden) > 0 {
			t.Errorf("%s: left behind: %v", name, hidden)
		}
	}
}

// What came before the wrong entry is there, and the answer says which that was.
func TestArchiveErrorSaysHowFar(t *testing.T) {
	b := newBench(t)
	status, body := b.unpack("t", archive(t, regular("one", "1"), regular("two", "2"), entry(tar.TypeFifo, "three", "")))
	if status != 400 || !strings.Contains(body, "Entry 3 (three)") || b.get("t/one") != "1" || b.get("t/two") != "2" {
		t.Errorf("%d %s", status, body)
	}
}

// What is planted in the tree is replaced, never written through; what the directory was, it stays.
func TestUnpackOverPlantedThings(t *testing.T) {
	b := newBench(t)
	victim := b.put("victim", "precious")
	b.put("t/keep", "kept")
	for _, err := range []error{
		os.Symlink(victim, b.path("t/symlink")), os.Link(victim, b.path("t/link")), unix.Mkfifo(b.path("t/fifo"), 0o600),
		os.Symlink(b.dir, b.path("t/dir")), unix.Chmod(b.path("t"), 0o1777), os.Symlink(filepath.Base(b.dir), b.path("loop")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	again := regular("symlink", "second")
	again.Mode = 0o600
	status, body := b.unpack("t", archive(t, entry(tar.TypeDir, "./", ""), regular("symlink", "x"), regular("./link", "x"), regular("fifo", "x"), again,
		entry(tar.TypeLink, "symlink", "symlink"), entry(tar.TypeSymlink, "dir", "elsewhere")))
	if status != 200 {
		t.Fatalf("%d %s", status, body)
	}
	if b.get("victim") != "precious" || b.get("t/symlink") != "second" || b.get("t/link") != "x" || b.get("t/fifo") != "x" || b.get("t/keep") != "kept" {
		t.Error("written through, or not at all")
	}
	if st, _ := os.Stat(b.path("t")); st.Mode().Perm() != 0o777 || st.Mode()&os.ModeSticky == 0 {
		t.Errorf("the archive changed the directory itself: %v", st.Mode())
	}
	if to, _ := os.Readlink(b.path("t/dir")); to != "elsewhere" {
		t.Errorf("link to %q", to)
	}
	if left, _ := filepath.Glob(b.path("t/.execd-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	for _, given := range []string{"/proc", "/proc/self/fd", "/proc/self/cwd", b.path("victim")} {
		if status, _, body := b.call("POST", "/files/tar", q("path", given), bytes.NewReader(archive(t, regular("x", "x")))); status < 400 {
			t.Errorf("%s: %d %s", given, status, body)
		}
	}
}

// swap exchanges a directory and a link to another one, again and again, until the function it returns is called.
func swap(t *testing.T, dir, link string) (stop func()) {
	t.Helper()
	quit := make(chan struct{})
	var running sync.WaitGroup
	running.Add(1)
	go func() {
		defer running.Done()
		for {
			select {
			case <-quit:
				return
			default:
				_ = unix.Renameat2(unix.AT_FDCWD, dir, unix.AT_FDCWD, link, unix.RENAME_EXCHANGE)
			}
		}
	}()
	return func() { close(quit); running.Wait() }
}

// Between a check and a use somebody exchanges a directory for a link to the outside. Nothing gets there.
func TestUnpackRacesWithASwap(t *testing.T) {
	b := newBench(t)
	for _, dir := range []string{"t/d/e", "outside/e"} {
		if err := os.MkdirAll(b.path(dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b.put("outside/e/f", "precious")
	if err := os.Symlink(b.path("outside"), b.path("link")); err != nil {
		t.Fatal(err)
	}
	dir := entry(tar.TypeDir, "d/e/", "")
	dir.Mode = 0o700
	data := archive(t, regular("d/e/f", "x"), dir, regular("d/g", "x"), entry(tar.TypeLink, "d/h", "d/g"), entry(tar.TypeSymlink, "d/e/s", "x"), regular("d/new/sub/f", "x"))
	stop := swap(t, b.path("t/d"), b.path("link"))
	ok, refused := 0, 0
	for range 2000 {
		if status, body := b.unpack("t", data); status == 200 {
			ok++
		} else if refused++; status != 400 {
			t.Errorf("%d %s", status, body)
		}
	}
	stop()
	t.Logf("%d extracted, %d refused", ok, refused)
	if st, err := os.Stat(b.path("outside/e")); err != nil || st.Mode().Perm() != 0o755 {
		t.Errorf("mode changed outside: %v %v", st, err)
	}
	got := inventoryNames(t, b.path("outside"))
	if got != "e e/f" || b.get("outside/e/f") != "precious" {
		t.Errorf("outside there is %s", got)
	}
}

func inventoryNames(t *testing.T, root string) string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(root, func(p string, _ os.DirEntry, err error) error {
		if p != root {
			names = append(names, strings.TrimPrefix(p, root+"/"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(names, " ")
}

// A link that appears where an archive is being read leads no reader out of the tree.
func TestPackRacesWithASwap(t *testing.T) {
	b := newBench(t)
	b.put("t/d/inside", "x")
	b.put("outside/secret", "precious")
	if err := os.Symlink(b.path("outside"), b.path("link")); err != nil {
		t.Fatal(err)
	}
	stop := swap(t, b.path("t/d"), b.path("link"))
	defer stop()
	for range 200 {
		res, err := b.c.Get(b.url + "/files/tar?" + q("path", b.path("t")).Encode())
		if err != nil {
			t.Fatal(err)
		}
		r := tar.NewReader(res.Body)
		for {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(h.Name, "secret") {
				t.Fatal("the archive holds what lies outside")
			}
		}
		res.Body.Close()
	}
}

// Many directories do not fit in memory all at once; all get their modes nevertheless.
func TestUnpackManyDirectories(t *testing.T) {
	x := &unpacker{}
	root, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	x.root = root
	long := strings.Repeat("n", 200)
	var items []item
	const many = 12_000
	for i := range many {
		d := entry(tar.TypeDir, long+string(rune('a'+i%26))+time.Duration(i).String()+"/", "")
		d.Mode = 0o711
		items = append(items, d)
	}
	if err := x.extract(t.Context(), bytes.NewReader(archive(t, items...))); err != nil {
		t.Fatal(err)
	}
	x.leave()
	if x.laterBytes > laterMax || len(x.later) >= many {
		t.Errorf("%d directories with %d bytes were held", len(x.later), x.laterBytes)
	}
	list, err := os.ReadDir(root.Name())
	if err != nil || len(list) != many {
		t.Fatalf("%d %v", len(list), err)
	}
	for _, e := range list {
		if info, _ := e.Info(); info.Mode().Perm() != 0o711 {
			t.Fatalf("%v", info.Mode())
		}
	}
}

func TestUnpackOwners(t *testing.T) {
	if os.Getuid() != 0 {
		t.Log("only root can give files away")
		return
	}
	b := newBench(t)
	foreign := regular("f", "x")
	foreign.Uid, foreign.Gid = 1234, 2345
	var st unix.Stat_t
	if status, body := b.unpack("t", archive(t, foreign), "owners", "false"); status != 200 {
		t.Fatal(body)
	}
	if err := unix.Stat(b.path("t/f"), &st); err != nil || st.Uid != 0 || st.Gid != 0 {
		t.Errorf("%d:%d %v", st.Uid, st.Gid, err)
	}
	if status, body := b.unpack("t", archive(t, foreign)); status != 200 {
		t.Fatal(body)
	}
	if err := unix.Stat(b.path("t/f"), &st); err != nil || st.Uid != 1234 || st.Gid != 2345 {
		t.Errorf("%d:%d %v", st.Uid, st.Gid, err)
	}
	foreign.Uid, foreign.Format = 1<<32-1, tar.FormatGNU
	if status, body := b.unpack("t", archive(t, foreign)); status != 400 || !strings.Contains(body, "owner") {
		t.Errorf("%d %s", status, body)
	}
}

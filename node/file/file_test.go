// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"net/textproto"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/testcage"
	"opensandbox.io/node/testleak"
	"opensandbox.io/node/wire"
)

func TestMain(m *testing.M) { testcage.Main(m, testleak.Main) }

type bench struct {
	*testing.T
	dir string
	url string
	c   *http.Client
}

func newBench(t *testing.T) *bench {
	t.Helper()
	dir := t.TempDir()
	mux := http.NewServeMux()
	New([]string{"HOME=" + dir, "DIR=" + dir}, dir).Routes(mux)
	srv := httptest.NewServer(reply.Handle(mux, nil, wire.CodeUnknown))
	t.Cleanup(srv.Close)
	return &bench{t, dir, srv.URL, srv.Client()}
}

func (b *bench) path(name string) string { return filepath.Join(b.dir, name) }

func (b *bench) put(name, text string) string {
	b.Helper()
	p := b.path(name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
		b.Fatal(err)
	}
	return p
}

func (b *bench) get(name string) string {
	b.Helper()
	data, err := os.ReadFile(b.path(name))
	if err != nil {
		b.Fatal(err)
	}
	return string(data)
}

// call sends a request and gives status, headers and body. It fails when the answer takes so long that something
// must be waiting for a FIFO.
func (b *bench) call(method, route string, query url.Values, body any, header ...string) (int, http.Header, string) {
	b.Helper()
	var in io.Reader
	switch body := body.(type) {
	case nil:
	case io.Reader:
		in = body
	default:
		data, err := json.Marshal(body)
		if err != nil {
			b.Fatal(err)
		}
		in = bytes.NewReader(data)
	}
	req, err := http.NewRequest(method, b.url+route+"?"+query.Encode(), in)
	if err != nil {
		b.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	client := *b.c
	client.Timeout = 10 * time.Second
	res, err := client.Do(req)
	if err != nil {
		b.Fatalf("%s %s: %v", method, route, err)
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil {
		b.Fatalf("%s %s: %v", method, route, err)
	}
	if res.StatusCode >= 400 {
		var e wire.ExecdError
		if json.Unmarshal(data, &e) != nil || e.Code == "" || e.Message == "" || e.Hint == "" {
			b.Errorf("%s %s: error body %s", method, route, data)
		}
	}
	return res.StatusCode, res.Header, string(data)
}

func q(pairs ...string) url.Values {
	v := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		v.Add(pairs[i], pairs[i+1])
	}
	return v
}

type upload struct{ meta, name, text string }

func (b *bench) upload(files ...upload) (int, string) {
	b.Helper()
	var body bytes.Buffer
	w := multipart.NewWriter(&body)
	for _, f := range files {
		if f.meta != "" {
			h := textproto.MIMEHeader{}
			h.Set("Content-Disposition", `form-data; name="metadata"; filename="metadata"`)
			h.Set("Content-Type", "application/json")
			p, _ := w.CreatePart(h)
			_, _ = io.WriteString(p, f.meta)
		}
		if f.name != "" {
			p, _ := w.CreateFormFile("file", f.name)
			_, _ = io.WriteString(p, f.text)
		}
	}
	_ = w.Close()
	status, _, text := b.call("POST", "/files/upload", nil, &body, "Content-Type", w.FormDataContentType())
	return status, text
}

func meta(path string, mode int) string {
	return fmt.Sprintf(`{"path":%q,"owner":null,"group":null,"mode":%d}`, path, mode)
}

func names(t *testing.T, body string) []string {
	t.Helper()
	var list []wire.FileInfo
	if err := json.Unmarshal([]byte(body), &list); err != nil {
		t.Fatalf("%v in %s", err, body)
	}
	out := []string{}
	for _, f := range list {
		out = append(out, f.Path)
	}
	return out
}

func TestUploadAndInfo(t *testing.T) {
	b := newBench(t)
	status, text := b.upload(
		upload{meta(b.path("a/b/one.txt"), 640), "../../evil", "one"},
		upload{meta("$DIR/two", 0), "/etc/passwd", strings.Repeat("x", 1<<20)},
		upload{meta("~/three", 755), "x", ""},
		upload{meta("relative", 4755), "x", "r"},
	)
	if status != 200 || text != "" {
		t.Fatalf("%d %s", status, text)
	}
	if b.get("a/b/one.txt") != "one" || len(b.get("two")) != 1<<20 || b.get("relative") != "r" {
		t.Error("contents differ")
	}
	status, _, body := b.call("GET", "/files/info", q("path", b.path("a/b/one.txt"), "path", "~/three", "path", "relative", "path", b.path("a")), nil)
	var info map[string]wire.FileInfo
	if err := json.Unmarshal([]byte(body), &info); err != nil || status != 200 {
		t.Fatalf("%d %s", status, body)
	}
	one := info[b.path("a/b/one.txt")]
	if one.Mode != 640 || one.Type != "file" || one.Size != 3 || one.Path != b.path("a/b/one.txt") || time.Since(one.ModifiedAt) > time.Minute || time.Since(one.CreatedAt) > time.Minute {
		t.Errorf("%+v", one)
	}
	if three := info["~/three"]; three.Mode != 755 || three.Path != b.path("three") {
		t.Errorf("%+v", three)
	}
	if info["relative"].Mode != 4755 || info[b.path("a")].Type != "directory" || info[b.path("a")].Mode != 755 {
		t.Errorf("%+v", info)
	}
	if status, _, body := b.call("GET", "/files/info", nil, nil); status != 200 || body != "{}" {
		t.Errorf("no path: %d %s", status, body)
	}
	if status, _, _ := b.call("GET", "/files/info", q("path", b.path("two"), "path", b.path("nope")), nil); status != 404 {
		t.Errorf("one missing: %d", status)
	}
}

func TestUploadKeepsWhatWasThere(t *testing.T) {
	b := newBench(t)
	p := b.put("f", "old")
	if os.Getuid() == 0 {
		if err := os.Chown(p, 1234, 2345); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Chmod(p, 0o4751); err != nil {
		t.Fatal(err)
	}
	before, err := os.Open(p)
	if err != nil {
		t.Fatal(err)
	}
	defer before.Close()
	if status, text := b.upload(upload{meta(p, 0), "f", "new"}); status != 200 {
		t.Fatal(text)
	}
	var st unix.Stat_t
	if err := unix.Stat(p, &st); err != nil || st.Mode&0o7777 != 0o4751 || os.Getuid() == 0 && (st.Uid != 1234 || st.Gid != 2345) {
		t.Errorf("%o %d %d %v", st.Mode, st.Uid, st.Gid, err)
	}
	if old, _ := io.ReadAll(before); string(old) != "old" || b.get("f") != "new" {
		t.Errorf("not exchanged at once: %q %q", old, b.get("f"))
	}
}

func TestUploadRefuses(t *testing.T) {
	b := newBench(t)
	b.put("file", "x")
	for name, c := range map[string]struct {
		files []upload
		code  string
	}{
		"nothing":          {nil, "INVALID_FILE"},
		"no file":          {[]upload{{meta(b.path("x"), 0), "", ""}}, "INVALID_FILE"},
		"no metadata":      {[]upload{{"", "x", "x"}}, "INVALID_FILE"},
		"bad metadata":     {[]upload{{"{", "x", "x"}}, "INVALID_FILE_METADATA"},
		"no path":          {[]upload{{"{}", "x", "x"}}, "INVALID_FILE_METADATA"},
		"unknown field":    {[]upload{{`{"path":"/x","pth":1}`, "x", "x"}}, "INVALID_FILE_METADATA"},
		"mode":             {[]upload{{meta(b.path("x"), 689), "x", "x"}}, "INVALID_FILE_METADATA"},
		"negative mode":    {[]upload{{meta(b.path("x"), -644), "x", "x"}}, "INVALID_FILE_METADATA"},
		"owner":            {[]upload{{`{"path":"/tmp/x","owner":"no-such-user"}`, "x", "x"}}, "INVALID_FILE_METADATA"},
		"directory":        {[]upload{{meta(b.dir, 0), "x", "x"}}, "INVALID_FILE"},
		"itself":           {[]upload{{meta(b.dir+"/.", 0), "x", "x"}}, ""},
		"below a file":     {[]upload{{meta(b.path("file/x"), 0), "x", "x"}}, "INVALID_FILE"},
		"NUL":              {[]upload{{`{"path":"/tmp/a\u0000b"}`, "x", "x"}}, "INVALID_REQUEST_BODY"},
		"name too long":    {[]upload{{meta(b.path(strings.Repeat("x", 300)), 0), "x", "x"}}, "INVALID_FILE"},
		"undefined":        {[]upload{{meta("/$NOPE/x", 0), "x", "x"}}, "INVALID_REQUEST_BODY"},
		"procfs":           {[]upload{{meta("/proc/self/comm", 0), "x", "x"}}, "NOT_SUPPORTED"},
		"procfs directory": {[]upload{{meta("/proc/sys/x", 0), "x", "x"}}, "NOT_SUPPORTED"},
	} {
		status, text := b.upload(c.files...)
		if status < 400 || !strings.Contains(text, `"`+c.code) {
			t.Errorf("%s: %d %s", name, status, text)
		}
	}
	left, _ := os.ReadDir(b.dir)
	if len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
	if status, _, text := b.call("POST", "/files/upload", nil, strings.NewReader("x"), "Content-Type", "text/plain"); status != 400 || !strings.Contains(text, "INVALID_FILE") {
		t.Errorf("not multipart: %d %s", status, text)
	}
}

// A client that stops in the middle leaves the old file, and nothing beside it.
func TestBrokenUploadChangesNothing(t *testing.T) {
	b := newBench(t)
	p := b.put("f", "old")
	r, w := io.Pipe()
	req, _ := http.NewRequest("POST", b.url+"/files/upload", r)
	req.Header.Set("Content-Type", "multipart/form-data; boundary=B")
	failed := make(chan error)
	go func() {
		res, err := b.c.Do(req)
		if err == nil {
			res.Body.Close()
			err = fmt.Errorf("status %d", res.StatusCode)
		}
		failed <- err
	}()
	_, _ = io.WriteString(w, "--B\r\nContent-Disposition: form-data; name=\"metadata\"; filename=\"metadata\"\r\n\r\n"+meta(p, 0)+"\r\n--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n")
	_, _ = w.Write(bytes.Repeat([]byte("x"), 1<<20))
	w.CloseWithError(io.ErrUnexpectedEOF)
	<-failed
	b.c.CloseIdleConnections()
	deadline := time.Now().Add(10 * time.Second)
	for {
		left, _ := os.ReadDir(b.dir)
		if len(left) == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("left behind: %v", left)
		}
		time.Sleep(time.Millisecond) // the server notices on its own time
	}
	if b.get("f") != "old" {
		t.Error("half a file was written")
	}
}

func TestDownload(t *testing.T) {
	b := newBench(t)
	p := b.put("ünï.txt", "0123456789")
	empty := b.put("empty", "")
	for _, c := range []struct {
		path, ranges string
		status       int
		body, header string
	}{
		{p, "", 200, "0123456789", ""},
		{p, "bytes=2-4", 206, "234", "bytes 2-4/10"},
		{p, "bytes=7-", 206, "789", "bytes 7-9/10"},
		{p, "bytes=-3", 206, "789", "bytes 7-9/10"},
		{p, "bytes=-99", 206, "0123456789", "bytes 0-9/10"},
		{p, "bytes=8-99999999999999999999", 416, "", "bytes */10"},
		{p, "bytes=8-9223372036854775807", 206, "89", "bytes 8-9/10"},
		{p, "bytes=0-0,5-6", 206, "0", "bytes 0-0/10"},
		{p, "bytes=10-", 416, "", "bytes */10"},
		{p, "bytes=4-2", 416, "", "bytes */10"},
		{p, "bytes=x-", 416, "", "bytes */10"},
		{p, "lines=1-2", 416, "", "bytes */10"},
		{empty, "", 200, "", ""},
		{empty, "bytes=0-", 416, "", "bytes */0"},
	} {
		var header []string
		if c.ranges != "" {
			header = []string{"Range", c.ranges}
		}
		status, h, body := b.call("GET", "/files/download", q("path", c.path), nil, header...)
		if status != c.status || status < 400 && body != c.body || h.Get("Content-Range") != c.header {
			t.Errorf("%s: %d %q %q", c.ranges, status, body, h.Get("Content-Range"))
		}
	}
	_, h, _ := b.call("GET", "/files/download", q("path", p), nil)
	if got := h.Get("Content-Disposition"); got != "attachment; filename*=utf-8''%C3%BCn%C3%AF.txt" || h.Get("Content-Length") != "10" {
		t.Errorf("headers %v", h)
	}
	for query, want := range map[string]int{"": 400, "path=" + url.QueryEscape(b.path("nope")): 404, "path=" + url.QueryEscape(b.dir): 400, "path=%2Fproc%2Fmeminfo": 501} {
		v, _ := url.ParseQuery(query)
		if status, _, _ := b.call("GET", "/files/download", v, nil); status != want {
			t.Errorf("%s: %d", query, status)
		}
	}
}

func TestDownloadLines(t *testing.T) {
	b := newBench(t)
	long := strings.Repeat("z", 600_000)
	p := b.put("f", "one\r\ntwo\n\nfour\r\r\n"+long+"\r\nlast\r")
	for _, c := range []struct{ offset, limit, want string }{
		{"1", "1", "one"},
		{"1", "2", "one\ntwo"},
		{"2", "2", "two\n"},
		{"2", "3", "two\n\nfour\r"},
		{"", "1", "one"},
		{"5", "", long + "\nlast\r"},
		{"5", "1", long},
		{"6", "9", "last\r"},
		{"7", "", ""},
		{"99", "1", ""},
	} {
		v := q("path", p)
		if c.offset != "" {
			v.Set("offset", c.offset)
		}
		if c.limit != "" {
			v.Set("limit", c.limit)
		}
		if status, _, body := b.call("GET", "/files/download", v, nil); status != 200 || body != c.want {
			t.Errorf("%s %s: %d %.60q", c.offset, c.limit, status, body)
		}
	}
	for _, bad := range []url.Values{q("path", p, "offset", "0"), q("path", p, "limit", "-1"), q("path", p, "limit", "x")} {
		if status, _, _ := b.call("GET", "/files/download", bad, nil); status != 400 {
			t.Errorf("%v: %d", bad, status)
		}
	}
	if status, _, _ := b.call("GET", "/files/download", q("path", p, "offset", "1"), nil, "Range", "bytes=0-1"); status != 400 {
		t.Errorf("with Range: %d", status)
	}
}

// What a program in the sandbox can plant where a path leads: none of it may hang, or open what is not a file, or
// reach the daemon's own descriptors. Every target is one of the test's own: were it reached, nothing else would be lost.
func TestPlantedThings(t *testing.T) {
	b := newBench(t)
	t.Chdir(b.dir) // /proc/self/cwd
	secret := b.put("secret", "secret")
	held, err := os.Open(secret) // like the daemon's spool
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	magic := fmt.Sprintf("/proc/self/fd/%d", held.Fd())
	fifo := b.path("fifo")
	if err := unix.Mkfifo(fifo, 0o644); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{"magic": magic, "root": "/proc/self/root" + secret, "loop": "loop", "tofifo": "fifo", "proc": "/proc/version", "dirmagic": "/proc/self/fd", "self": "/proc/self/cwd"} {
		if err := os.Symlink(target, b.path(name)); err != nil {
			t.Fatal(err)
		}
	}
	hostile := []string{magic, b.path("magic"), b.path("root"), b.path("loop"), fifo, b.path("tofifo"), b.path("proc"), b.path("self/secret"), "/proc/self/environ", "/proc/../proc/self/environ"}
	hostile = append(hostile, b.path(fmt.Sprintf("dirmagic/%d", held.Fd())))
	if device := b.path("zero"); unix.Mknod(device, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))) == nil { // with the rights for it
		hostile = append(hostile, device)
	}
	for _, p := range hostile {
		if status, _, body := b.call("GET", "/files/download", q("path", p), nil); status < 400 {
			t.Errorf("download %s: %d %.40q", p, status, body)
		}
		if status, text := b.upload(upload{meta(p, 0), "x", "overwritten"}); status < 400 {
			t.Errorf("upload %s: %d %s", p, status, text)
		}
		if status, _, _ := b.call("POST", "/files/replace", nil, map[string]any{p: map[string]string{"old": "s", "new": "t"}}); status < 400 {
			t.Errorf("replace %s: %d", p, status)
		}
	}
	for _, p := range []string{magic, b.path("magic"), b.path("root"), "/proc/self/environ"} {
		if status, _, body := b.call("POST", "/files/permissions", nil, map[string]any{p: map[string]any{"mode": 777}}); status < 400 {
			t.Errorf("permissions %s: %d %s", p, status, body)
		}
	}
	if b.get("secret") != "secret" {
		t.Errorf("secret is %q", b.get("secret"))
	}
	if st, _ := os.Stat(secret); st.Mode().Perm() != 0o644 {
		t.Errorf("mode of the secret is %o", st.Mode().Perm())
	}
	for _, p := range []string{b.path("dirmagic"), b.path("self"), "/proc/self/fd"} {
		if status, _, body := b.call("GET", "/directories/list", q("path", p), nil); status < 400 {
			t.Errorf("list %s: %d %.80s", p, status, body)
		}
		// A link is not followed: at most it is itself a hit.
		if status, _, body := b.call("GET", "/files/search", q("path", p+"/"), nil); status == 200 && len(names(t, body)) > 1 {
			t.Errorf("search %s: %d %s", p, status, body)
		}
	}
	// Looking at them is harmless.
	for p, kind := range map[string]string{fifo: "other", b.path("magic"): "symlink", "/dev/null": "other"} {
		status, _, body := b.call("GET", "/files/info", q("path", p), nil)
		if status != 200 || !strings.Contains(body, `"type":"`+kind+`"`) {
			t.Errorf("info %s: %d %s", p, status, body)
		}
	}
}

func TestSymlinksLeadWhereTheyLead(t *testing.T) {
	b := newBench(t)
	b.put("real/file", "old")
	if err := os.Symlink("real/file", b.path("link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("real", b.path("dir")); err != nil {
		t.Fatal(err)
	}
	if status, text := b.upload(upload{meta(b.path("link"), 600), "x", "new"}, upload{meta(b.path("dir/../dir/second"), 0), "x", "2"}); status != 200 {
		t.Fatal(text)
	}
	if b.get("real/file") != "new" || b.get("real/second") != "2" {
		t.Error("the link was not followed")
	}
	if l, err := os.Readlink(b.path("link")); err != nil || l != "real/file" {
		t.Errorf("the link itself was replaced: %q %v", l, err)
	}
	// `dir/..` is where the link leads, so this is the file beside real, not below dir.
	b.put("beside", "b")
	if _, _, body := b.call("GET", "/files/download", q("path", b.path("dir")+"/../beside"), nil); body != "b" {
		t.Errorf("got %q", body)
	}
	// Deleting a link spares what it leads to.
	if status, _, _ := b.call("DELETE", "/files", q("path", b.path("link")), nil); status != 200 || b.get("real/file") != "new" {
		t.Error("delete went through the link")
	}
	if status, _, _ := b.call("DELETE", "/directories", q("path", b.path("dir")), nil); status != 200 || b.get("real/file") != "new" {
		t.Error("directory delete went through the link")
	}
}

// A temporary file is never one that somebody has put there.
func TestTemporaryIsNeverPlanted(t *testing.T) {
	b := newBench(t)
	p, err := open(b.path("f"), false)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	seen := map[string]bool{}
	for range 100 {
		name, f, err := p.temporary(false)
		if err != nil || seen[name] || len(name) < 20 {
			t.Fatalf("%s %v", name, err)
		}
		seen[name] = true
		f.Close()
	}
	victim := b.put("victim", "old")
	if err := os.Symlink(victim, b.path("planted")); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Openat(p.fd(), "planted", unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != unix.EEXIST {
		t.Errorf("%d %v", fd, err)
	}
}

func TestMoves(t *testing.T) {
	b := newBench(t)
	b.put("a", "a")
	b.put("taken", "t")
	b.put("tree/x/y", "y")
	mv := func(src, dest string) int {
		status, _, _ := b.call("POST", "/files/mv", nil, []map[string]string{{"src": b.path(src), "dest": b.path(dest)}})
		return status
	}
	for _, c := range []struct {
		src, dest string
		want      int
	}{
		{"nope", "x", 404}, {"a", "taken", 500}, {"a", "new/dir/b", 200}, {"tree", "tree2", 200}, {"tree2", "tree2/inside", 500}, {"tree2", ".", 500},
	} {
		if got := mv(c.src, c.dest); got != c.want {
			t.Errorf("%s to %s: %d", c.src, c.dest, got)
		}
	}
	if b.get("new/dir/b") != "a" || b.get("taken") != "t" || b.get("tree2/x/y") != "y" {
		t.Error("contents")
	}
}

func TestTransferCopiesATree(t *testing.T) {
	b := newBench(t)
	b.put("tree/x/y", "y")
	if err := unix.Chmod(b.path("tree/x/y"), 0o4711); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("x/y", b.path("tree/l")); err != nil {
		t.Fatal(err)
	}
	src, _ := open(b.path("tree"), false)
	dest, _ := open(b.path("copy"), false)
	defer src.Close()
	defer dest.Close()
	if err := transfer(t.Context(), src, dest); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(b.path("copy/x/y"))
	if err != nil || st.Mode().Perm() != 0o711 || st.Mode()&os.ModeSetuid == 0 || b.get("copy/l") != "y" {
		t.Errorf("%v %v", st, err)
	}
	if _, err := os.Lstat(b.path("tree")); !os.IsNotExist(err) {
		t.Error("the source is still there")
	}
	// What cannot be copied leaves the source whole and no half copy.
	b.put("odd/z", "z")
	if err := unix.Mkfifo(b.path("odd/fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	src2, _ := open(b.path("odd"), false)
	dest2, _ := open(b.path("half"), false)
	defer src2.Close()
	defer dest2.Close()
	if err := transfer(t.Context(), src2, dest2); err == nil {
		t.Error("no error")
	}
	if _, err := os.Lstat(b.path("half")); !os.IsNotExist(err) || b.get("odd/z") != "z" {
		t.Error("half a move")
	}
}

func TestListAndSearch(t *testing.T) {
	b := newBench(t)
	for _, f := range []string{"b.py", "a/c.py", "a/d.txt", "a/e/f.py", "z"} {
		b.put(f, f)
	}
	if err := os.Symlink("a", b.path("link")); err != nil {
		t.Fatal(err)
	}
	list := func(depth string) []string {
		_, _, body := b.call("GET", "/directories/list", q("path", b.dir, "depth", depth), nil)
		out := names(t, body)
		for i := range out {
			out[i], _ = filepath.Rel(b.dir, out[i])
		}
		return out
	}
	for depth, want := range map[string]string{
		"0": "", "1": "a b.py link z", "": "a b.py link z", "2": "a a/c.py a/d.txt a/e b.py link z", "9": "a a/c.py a/d.txt a/e a/e/f.py b.py link z",
	} {
		if got := strings.Join(list(depth), " "); got != want {
			t.Errorf("depth %s: %s", depth, got)
		}
	}
	for pattern, want := range map[string]int{"*.py": 3, "**": 6, "": 6, "**/*.py": 3, "?.txt": 1, "[c-f].py": 2, "{b,c}.*": 2, "a": 0, "a/c.py": 0, "nothing": 0} {
		_, _, body := b.call("GET", "/files/search", q("path", b.dir, "pattern", pattern), nil)
		if got := names(t, body); len(got) != want {
			t.Errorf("%s: %v", pattern, got)
		}
	}
	for _, c := range []struct {
		route string
		query url.Values
		want  int
	}{
		{"/directories/list", q("path", b.path("nope")), 404}, {"/directories/list", q("path", b.path("link")), 400}, {"/directories/list", q("path", b.path("z")), 400},
		{"/directories/list", q(), 400}, {"/directories/list", q("path", b.dir, "depth", "-1"), 400}, {"/directories/list", q("path", b.dir, "depth", "x"), 400},
		{"/files/search", q("path", b.path("nope")), 404}, {"/files/search", q(), 400}, {"/files/search", q("path", b.dir, "pattern", "["), 400}, {"/files/search", q("path", b.dir, "pattern", "{a"), 400},
	} {
		if status, _, _ := b.call("GET", c.route, c.query, nil); status != c.want {
			t.Errorf("%s %v: %d", c.route, c.query, status)
		}
	}
}

// Names that are not UTF-8 are listed, and what is listed finds them again.
func TestNamesThatAreNotText(t *testing.T) {
	b := newBench(t)
	raw := "bad\xff100%\xc3"
	b.put("dir\xfe/"+raw, "found")
	b.put("100%FF", "literal")
	_, _, body := b.call("GET", "/files/search", q("path", b.dir), nil)
	got := names(t, body)
	slices.Sort(got)
	if len(got) != 2 || got[0] != b.path("100%25FF") || got[1] != b.path("dir%FE/bad%FF100%25%C3") {
		t.Fatalf("listed as %q", got)
	}
	for _, p := range []string{got[1], b.path("dir\xfe/" + raw)} { // a query can also carry the bytes themselves
		if status, _, text := b.call("GET", "/files/download", q("path", p), nil); status != 200 || text != "found" {
			t.Errorf("%q: %d %s", p, status, text)
		}
	}
	if _, _, text := b.call("GET", "/files/download", q("path", got[0]), nil); text != "literal" {
		t.Errorf("a plain name with %%: %s", text)
	}
	if status, _, _ := b.call("DELETE", "/files", q("path", got[1]), nil); status != 200 {
		t.Error("delete")
	}
	if _, err := os.Stat(b.path("dir\xfe/" + raw)); !os.IsNotExist(err) {
		t.Error("not deleted")
	}
	for _, name := range []string{"x", "a%41", "%", "%F", "%FF%zz", "%ff"} {
		if raw, ok := unescape(name); ok {
			t.Errorf("%s became %q", name, raw)
		}
	}
}

// No two names are shown alike, and each shown name leads to its own file.
func TestShownNamesAreTheirOwn(t *testing.T) {
	b := newBench(t)
	all := []string{"n\xff", "n%FF", "n%25FF", "n%2525FF", "50%", "100%25", "a%41", "%C3%A4"}
	for _, name := range all {
		b.put(name, name)
	}
	_, _, body := b.call("GET", "/directories/list", q("path", b.dir), nil)
	shown := names(t, body)
	slices.Sort(shown)
	if len(shown) != len(all) || len(slices.Compact(slices.Clone(shown))) != len(all) {
		t.Fatalf("listed as %q", shown)
	}
	for _, name := range all[4:] {
		if !slices.Contains(shown, b.path(name)) {
			t.Errorf("%q is not shown as it is", name)
		}
	}
	got := []string{}
	for _, p := range shown {
		status, _, text := b.call("GET", "/files/download", q("path", p), nil)
		if status != 200 || escape(b.path(text)) != p {
			t.Errorf("%s leads to %d %q", p, status, text)
		}
		got = append(got, text)
		// The answer is found under what was asked for.
		if _, _, info := b.call("GET", "/files/info", q("path", p), nil); !strings.HasPrefix(info, `{"`+p+`":`) {
			t.Errorf("info of %s: %s", p, info)
		}
	}
	if slices.Sort(got); len(slices.Compact(got)) != len(all) {
		t.Errorf("read %q", got)
	}
	// Where nothing is shown like that, a name is a name.
	if status, text := b.upload(upload{meta(b.path("new%FF"), 0), "x", "new"}); status != 200 || b.get("new%FF") != "new" {
		t.Errorf("a new name: %d %s", status, text)
	}
	if _, _, text := b.call("GET", "/files/download", q("path", b.path("new%FF")), nil); text != "new" {
		t.Errorf("a plain name: %s", text)
	}
}

// What the kernel refuses because of the path is the caller's to correct.
func TestRefusalsAreTheCallers(t *testing.T) {
	for errno, want := range map[unix.Errno]string{
		unix.EROFS: "INVALID_FILE", unix.EACCES: "INVALID_FILE", unix.EPERM: "INVALID_FILE", unix.ENOTDIR: "INVALID_FILE",
		unix.EISDIR: "INVALID_FILE", unix.ENAMETOOLONG: "INVALID_FILE", unix.ELOOP: "INVALID_FILE",
		unix.ENOSPC: "RESOURCE_EXHAUSTED", unix.EDQUOT: "RESOURCE_EXHAUSTED", unix.EIO: "RUNTIME_ERROR",
	} {
		var f *reply.Fault
		if err := explain("/x", &os.PathError{Op: "open", Path: "t", Err: errno}); !errors.As(err, &f) || string(f.Code) != want ||
			want != "RUNTIME_ERROR" && f.Hint == "" {
			t.Errorf("%v: %v", errno, err)
		}
	}
	b := newBench(t)
	if err := unix.Mount("none", b.dir, "tmpfs", unix.MS_RDONLY, ""); err != nil {
		t.Skipf("a read-only place cannot be made: %v", err)
	}
	defer unix.Unmount(b.dir, unix.MNT_DETACH)
	if status, text := b.upload(upload{meta(b.path("x"), 0), "x", "x"}); status != 400 || !strings.Contains(text, "can only read") {
		t.Errorf("upload: %d %s", status, text)
	}
	if status, _, text := b.call("POST", "/directories", nil, map[string]any{b.path("d/e"): map[string]any{}}); status != 400 {
		t.Errorf("directory: %d %s", status, text)
	}
}

func TestReplace(t *testing.T) {
	b := newBench(t)
	p := b.put("f", "aXbXc")
	if err := os.Chmod(p, 0o751); err != nil {
		t.Fatal(err)
	}
	same := b.put("same", "unchanged")
	before, _ := os.Stat(same)
	status, _, body := b.call("POST", "/files/replace", q("verbose", "true"), map[string]any{
		"$DIR/f": map[string]string{"old": "X", "new": "--"}, same: map[string]string{"old": "zzz", "new": "y"},
	})
	if status != 200 || b.get("f") != "a--b--c" || !strings.Contains(body, `"$DIR/f":{"replacedCount":2}`) || !strings.Contains(body, `{"replacedCount":0}`) {
		t.Errorf("%d %s %q", status, body, b.get("f"))
	}
	if st, _ := os.Stat(p); st.Mode().Perm() != 0o751 {
		t.Errorf("mode %o", st.Mode().Perm())
	}
	if after, _ := os.Stat(same); !os.SameFile(before, after) {
		t.Error("a file without the text was rewritten")
	}
	if status, _, body := b.call("POST", "/files/replace", q("verbose", "false"), map[string]any{p: map[string]string{"old": "--", "new": ""}}); status != 200 || body != "" || b.get("f") != "abc" {
		t.Errorf("%d %q", status, body)
	}
	for _, c := range []struct {
		path, old string
		want      int
	}{{p, "", 400}, {b.path("nope"), "x", 404}, {b.dir, "x", 400}} {
		if status, _, _ := b.call("POST", "/files/replace", nil, map[string]any{c.path: map[string]string{"old": c.old, "new": "y"}}); status != c.want {
			t.Errorf("%s: %d", c.path, status)
		}
	}
}

func TestSubstituteIsReplaceAll(t *testing.T) {
	for _, c := range []struct{ in, from, to string }{
		{"aaaa", "aa", "b"}, {"abab", "ab", "abab"}, {strings.Repeat("xyz", 200_000), "zx", "-"}, {strings.Repeat("a", bufferSize-1) + "bc" + strings.Repeat("a", 10), "bc", "!"}, {"", "x", "y"},
		{strings.Repeat("ab", 300_000), strings.Repeat("ab", 100_000), "."},
	} {
		var out bytes.Buffer
		n, err := substitute(&out, strings.NewReader(c.in), []byte(c.from), []byte(c.to))
		if err != nil || out.String() != strings.ReplaceAll(c.in, c.from, c.to) || n != strings.Count(c.in, c.from) {
			t.Errorf("%.10q %.10q: %d %v", c.in, c.from, n, err)
		}
	}
}

func TestDirectoriesAndPermissions(t *testing.T) {
	b := newBench(t)
	made := map[string]any{b.path("a/b/c"): map[string]any{"mode": 1750, "owner": nil, "group": nil}, b.path("plain"): map[string]any{}}
	for range 2 { // the second time is no error and changes nothing
		if status, _, body := b.call("POST", "/directories", nil, made); status != 200 {
			t.Fatal(body)
		}
		st, err := os.Stat(b.path("a/b/c"))
		if err != nil || st.Mode().Perm() != 0o750 || st.Mode()&os.ModeSticky == 0 {
			t.Errorf("%v %v", st.Mode(), err)
		}
		made[b.path("a/b/c")] = map[string]any{"mode": 700}
	}
	f := b.put("f", "x")
	if status, _, _ := b.call("POST", "/directories", nil, map[string]any{f: map[string]any{}}); status != 400 {
		t.Errorf("on a file: %d", status)
	}
	want := map[string]any{"mode": 600}
	if os.Getuid() == 0 {
		want["owner"], want["group"] = "nobody", "12345"
	}
	if status, _, body := b.call("POST", "/files/permissions", nil, map[string]any{f: want}); status != 200 {
		t.Fatal(body)
	}
	var st unix.Stat_t
	_ = unix.Stat(f, &st)
	if st.Mode&0o7777 != 0o600 || os.Getuid() == 0 && (st.Uid == 0 || st.Gid != 12345) {
		t.Errorf("%o %d %d", st.Mode, st.Uid, st.Gid)
	}
	for p, code := range map[string]int{b.path("nope"): 404, "/proc/self/comm": 501} {
		if status, _, _ := b.call("POST", "/files/permissions", nil, map[string]any{p: map[string]any{"mode": 600}}); status != code {
			t.Errorf("%s: %d", p, status)
		}
	}
}

func TestDelete(t *testing.T) {
	b := newBench(t)
	b.put("a", "a")
	b.put("d/e/f", "f")
	for _, c := range []struct {
		route string
		query url.Values
		want  int
	}{
		{"/files", q("path", b.path("a"), "path", b.path("nope"), "path", b.path("no/pe")), 200}, {"/files", q("path", b.path("d")), 500}, {"/files", q(), 400}, {"/files", q("path", b.dir+"/d/."), 500},
		{"/directories", q("path", b.path("d"), "path", b.path("nope")), 200}, {"/directories", q("path", b.dir+"/."), 400}, {"/directories", q("path", b.dir+"/x/.."), 200}, {"/directories", q(), 400},
		{"/files", q("path", "/proc/self/comm"), 501},
	} {
		if status, _, body := b.call("DELETE", c.route, c.query, nil); status != c.want {
			t.Errorf("%s %v: %d %s", c.route, c.query, status, body)
		}
	}
	if left, _ := os.ReadDir(b.dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	// The root directory is such a "." too; that it is, is looked at here and never tried.
	for _, p := range []string{"/", "//", "/.", "/..", "/tmp/.."} {
		at, err := open(p, false)
		if err != nil || at.name != "." {
			t.Errorf("%s: %+v %v", p, at, err)
		}
		at.Close()
	}
	// Deep, and wider than what is read at once.
	deep := b.dir
	for range 300 {
		deep += "/d"
	}
	if err := os.MkdirAll(deep, 0o755); err != nil {
		t.Fatal(err)
	}
	for i := range 3000 {
		b.put(fmt.Sprintf("d/%d", i), "")
	}
	if status, _, body := b.call("DELETE", "/directories", q("path", b.path("d")), nil); status != 200 {
		t.Errorf("deep: %s", body)
	}
	if _, err := os.Stat(b.path("d")); !os.IsNotExist(err) {
		t.Error("still there")
	}
}

func TestGlob(t *testing.T) {
	for _, c := range []struct {
		pattern, name string
		want          bool
	}{
		{"*", "", true}, {"a*b*c", "axxbyyc", true}, {"a*b*c", "axxbyy", false}, {"?", "ä", true}, {"?", "ab", false}, {"[!a-c]x", "dx", true}, {"[!a-c]x", "bx", false}, {"[]]", "]", true}, {"[a\\]]", "]", true},
		{"{a,b{c,d}}e", "bde", true}, {"{a,b{c,d}}e", "be", false}, {"{,x}y", "y", true}, {`\*`, "*", true}, {`\*`, "x", false}, {"a}", "a}", true}, {"[[]", "[", true}, {"*a*a*a*a*a*a*a*b", strings.Repeat("a", 200), false}, {"\xff*", "\xffx", true},
	} {
		p, err := compile(c.pattern)
		if err != nil || p.match(c.name) != c.want {
			t.Errorf("%s %s: %v", c.pattern, c.name, err)
		}
	}
	for _, bad := range []string{"[", "[a", "{", "{a,{b}", `\`, strings.Repeat("{a,b}", 20)} {
		if _, err := compile(bad); err == nil {
			t.Errorf("%s passed", bad)
		}
	}
}

func FuzzGlob(f *testing.F) {
	f.Add("*.{py,txt}", "a.py")
	f.Add("[!a-z]?\\*", "x")
	f.Fuzz(func(_ *testing.T, pattern, name string) {
		if p, err := compile(pattern); err == nil {
			p.match(name)
		}
	})
}

func FuzzEscape(f *testing.F) {
	f.Add("a\xff%")
	f.Add("%FF")
	f.Add("%25FF")
	f.Add("%2525C3x%41")
	f.Fuzz(func(t *testing.T, name string) {
		if len(name) > 255 {
			return // not a name
		}
		shown := escape(name)
		raw, ok := unescape(shown)
		if !utf8.ValidString(shown) || (shown != name) != ok || ok && raw != name {
			t.Errorf("%q shown as %q comes back as %q %v", name, shown, raw, ok)
		}
		// And the other way round: what unescape takes is what escape makes.
		if raw, ok := unescape(name); ok && escape(raw) != name {
			t.Errorf("%q is taken for %q, which is shown as %q", name, raw, escape(raw))
		}
	})
}

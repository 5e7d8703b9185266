// SPDX-License-Identifier: Apache-2.0

package file

import (
	"archive/tar"
	"bytes"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/thread"
)

const somebody = "/v1/filesystem/1000/1001"

// open lets everybody come as far as the bench's directory.
func (b *bench) open(mode os.FileMode) {
	b.Helper()
	if err := os.Chmod(filepath.Dir(b.dir), 0o755); err != nil {
		b.Fatal(err)
	}
	if err := os.Chmod(b.dir, mode); err != nil {
		b.Fatal(err)
	}
}

// squashable is true where files can be worked on as somebody else. Without root that must be refused, and is tested.
func squashable(t *testing.T) bool {
	t.Helper()
	if os.Getuid() == 0 {
		return true
	}
	b := newBench(t)
	if status, _, body := b.call("GET", somebody+"/files/info", q("path", b.dir), nil); status != 501 || !strings.Contains(body, "NOT_SUPPORTED") {
		t.Errorf("without root: %d %s", status, body)
	}
	return false
}

func TestIdentityOwnsWhatItMakes(t *testing.T) {
	if !squashable(t) {
		return
	}
	b := newBench(t)
	b.open(0o777)
	ask := func(method, route string, query []string, body any) {
		t.Helper()
		if status, _, text := b.call(method, somebody+route, q(query...), body); status != 200 {
			t.Errorf("%s %s: %d %s", method, route, status, text)
		}
	}
	ask("PUT", "/files/content", []string{"path", b.path("put/f")}, strings.NewReader("x"))
	ask("PUT", "/files/content", []string{"path", b.path("parts"), "offset", "0"}, strings.NewReader("x"))
	ask("PUT", "/files/content", []string{"path", b.path("parts"), "offset", "1", "final", "true"}, strings.NewReader("y"))
	ask("POST", "/directories", nil, map[string]any{b.path("made/deep"): map[string]any{"mode": 750}})
	foreign := regular("f", "x")
	foreign.Uid, foreign.Gid = 4321, 4321
	ask("POST", "/files/tar", []string{"path", b.path("tar")}, bytes.NewReader(archive(t, foreign, entry(tar.TypeSymlink, "l", "f"), entry(tar.TypeDir, "d/", ""))))
	for _, name := range []string{"put", "put/f", "parts", "made", "made/deep", "tar", "tar/f", "tar/l", "tar/d"} {
		var st unix.Stat_t
		if err := unix.Lstat(b.path(name), &st); err != nil || st.Uid != 1000 || st.Gid != 1001 {
			t.Errorf("%s belongs to %d:%d, %v", name, st.Uid, st.Gid, err)
		}
	}
	ask("DELETE", "/directories", []string{"path", b.path("made")}, nil)
	// Those after it are root's again.
	b.content("roots", "x")
	var st unix.Stat_t
	if err := unix.Stat(b.path("roots"), &st); err != nil || st.Uid != 0 || st.Gid != 0 {
		t.Errorf("%d:%d %v", st.Uid, st.Gid, err)
	}
}

// Every way to see or change root's files is closed to others.
func TestIdentityIsNotRoot(t *testing.T) {
	if !squashable(t) {
		return
	}
	b := newBench(t)
	b.open(0o755)
	secret := b.put("secret", "precious")
	public := b.put("public", "text")
	b.put("closed/f", "precious")
	b.put("shared/f", "text")
	b.put("tree/inner/f", "x")
	for _, err := range []error{
		os.Chmod(secret, 0o600), os.Chmod(b.path("closed"), 0o700), os.Chmod(b.path("shared"), 0o777), os.Chmod(b.path("tree/inner"), 0o700),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	unchanged := func() string { // but for the time of a directory in which something was tried
		return regexp.MustCompile(`(?m)^\["/shared",.*$`).ReplaceAllString(inventory(t, b.dir), "")
	}
	before := unchanged()
	var body bytes.Buffer
	body.WriteString("--B\r\nContent-Disposition: form-data; name=\"metadata\"; filename=\"metadata\"\r\n\r\n" + meta(public, 0) +
		"\r\n--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\nevil\r\n--B--\r\n")
	for _, c := range []struct {
		method, route string
		query         []string
		body          any
		header        []string
	}{
		{"GET", "/files/download", []string{"path", secret}, nil, nil},
		{"GET", "/files/info", []string{"path", b.path("closed/f")}, nil, nil},
		{"GET", "/directories/list", []string{"path", b.path("closed")}, nil, nil},
		{"GET", "/files/search", []string{"path", b.path("closed")}, nil, nil},
		{"GET", "/files/tar", []string{"path", b.path("closed")}, nil, nil},
		{"GET", "/files/tar", []string{"path", b.path("tree")}, nil, nil},
		{"GET", "/files/watch", []string{"path", b.path("closed")}, nil, nil},
		{"PUT", "/files/content", []string{"path", public}, strings.NewReader("evil"), nil},
		{"PUT", "/files/content", []string{"path", b.path("new")}, strings.NewReader("evil"), nil},
		// The directory would let it, but the file does not.
		{"PUT", "/files/content", []string{"path", b.path("shared/f")}, strings.NewReader("evil"), nil},
		{"PUT", "/files/content", []string{"path", b.path("shared/f"), "offset", "0", "final", "true"}, strings.NewReader("evil"), nil},
		{"POST", "/files/replace", nil, map[string]any{public: map[string]any{"old": "text", "new": "evil"}}, nil},
		{"POST", "/files/permissions", nil, map[string]any{public: map[string]any{"mode": 666}}, nil},
		{"POST", "/files/permissions", nil, map[string]any{public: map[string]any{"owner": "1000"}}, nil},
		{"POST", "/files/mv", nil, []any{map[string]any{"src": public, "dest": b.path("moved")}}, nil},
		{"POST", "/directories", nil, map[string]any{b.path("made"): map[string]any{}}, nil},
		{"DELETE", "/files", []string{"path", public}, nil, nil},
		{"DELETE", "/directories", []string{"path", b.path("tree")}, nil, nil},
		{"POST", "/files/upload", nil, &body, []string{"Content-Type", "multipart/form-data; boundary=B"}},
		{"POST", "/files/tar", []string{"path", b.path("tree")}, bytes.NewReader(archive(t, regular("f", "evil"))), nil},
	} {
		if status, _, text := b.call(c.method, somebody+c.route, q(c.query...), c.body, c.header...); status < 400 || strings.Contains(text, "precious") {
			t.Errorf("%s %s %v: %d %s", c.method, c.route, c.query, status, text)
		}
	}
	// A file for oneself that is given away.
	if status, _, _ := b.call("PUT", somebody+"/files/content", q("path", b.path("shared/mine"), "owner", "0"), strings.NewReader("x")); status < 400 {
		t.Error("a file was given to root")
	}
	if after := unchanged(); after != before {
		t.Errorf("%s\nbecame\n%s", before, after)
	}
	for name, want := range map[string]string{"secret": "precious", "public": "text", "closed/f": "precious", "shared/f": "text", "tree/inner/f": "x"} {
		if b.get(name) != want {
			t.Errorf("%s is %q", name, b.get(name))
		}
	}
	if list, _ := os.ReadDir(b.path("shared")); len(list) != 1 {
		t.Errorf("left behind: %v", list)
	}
	if status, _, text := b.call("GET", somebody+"/files/download", q("path", public), nil); status != 200 || text != "text" {
		t.Errorf("what all may read: %d %s", status, text)
	}
	if status, _, text := b.call("GET", "/v1/filesystem/0/0/files/download", q("path", secret), nil); status != 200 || text != "precious" {
		t.Errorf("root as root: %d %s", status, text)
	}
}

// Whoever may write a file that is not his fills it, and it stays its owner's.
func TestIdentityWritesFilesOfOthers(t *testing.T) {
	if !squashable(t) {
		return
	}
	b := newBench(t)
	b.open(0o777)
	p := b.put("f", "old")
	if err := unix.Chmod(p, 0o666); err != nil {
		t.Fatal(err)
	}
	for i, query := range [][]string{{}, {"offset", "0", "final", "true"}} {
		text := strings.Repeat("x", i+1)
		if status, _, body := b.call("PUT", somebody+"/files/content", q(append(query, "path", p)...), strings.NewReader(text)); status != 200 || b.get("f") != text {
			t.Errorf("%d %s", status, body)
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(p, &st); err != nil || st.Uid != 0 || st.Mode&0o777 != 0o666 || len(b.entries()) != 1 {
		t.Errorf("%d %o %v %v", st.Uid, st.Mode, err, b.entries())
	}
}

func TestIdentityHasItsGroups(t *testing.T) {
	if !squashable(t) {
		return
	}
	b := newBench(t)
	b.open(0o755)
	p := b.put("f", "x")
	for _, err := range []error{os.Chown(p, 0, 4242), os.Chmod(p, 0o640)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		id identity
		ok bool
	}{
		{identity{1000, 1000, nil}, false}, {identity{1000, 1000, []uint32{1, 4242}}, true}, {identity{1000, 4242, nil}, true},
	} {
		_, err := thread.Run(func() (struct{}, bool, error) {
			if err := c.id.assume(); err != nil {
				return struct{}{}, false, err
			}
			fd, err := unix.Open(p, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err == nil {
				_ = unix.Close(fd)
			}
			return struct{}{}, false, err
		})
		if (err == nil) != c.ok {
			t.Errorf("%+v: %v", c.id, err)
		}
	}
}

// The rights belong to one request: those beside it, on whatever thread, keep theirs.
func TestIdentitiesDoNotMix(t *testing.T) {
	if !squashable(t) {
		return
	}
	b := newBench(t)
	b.open(0o755)
	secret := b.put("secret", "precious")
	if err := os.Chmod(secret, 0o600); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := range 8 {
		all.Add(1)
		go func() {
			defer all.Done()
			for range 50 {
				prefix, want := "", 200
				if i%2 == 0 {
					prefix, want = somebody, 400
				}
				if status, _, body := b.call("GET", prefix+"/files/download", q("path", secret), nil); status != want {
					t.Errorf("%q: %d %s", prefix, status, body)
				}
			}
		}()
	}
	all.Wait()
	// No thread that stays has anything but what the first one has.
	want := rights(t, "self")
	eventually(t, func() bool {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return !slices.ContainsFunc(tasks, func(task os.DirEntry) bool {
			got := rights(t, "self/task/"+task.Name())
			return got != "" && got != want
		})
	})
}

func rights(t *testing.T, task string) string {
	t.Helper()
	data, err := os.ReadFile("/proc/" + task + "/status")
	if err != nil {
		return "" // it has ended
	}
	var out []string
	for line := range strings.Lines(string(data)) {
		for _, key := range []string{"Uid:", "Gid:", "Groups:", "CapEff:", "CapPrm:"} {
			if strings.HasPrefix(line, key) {
				out = append(out, strings.TrimSpace(line))
			}
		}
	}
	return strings.Join(out, " ")
}

func TestIdentityPaths(t *testing.T) {
	b := newBench(t)
	for _, who := range []string{"root/root", "-1/0", "0/-1", "4294967295/0", "0/4294967295", "99999999999/0", "1e3/0", "%2e%2e/0"} {
		if status, _, body := b.call("GET", "/v1/filesystem/"+who+"/files/info", nil, nil); status != 400 {
			t.Errorf("%s: %d %s", who, status, body)
		}
	}
	// Each route is there too.
	mux := http.NewServeMux()
	New(nil, "/").Routes(mux)
	for _, route := range []string{
		"GET /files/info", "DELETE /files", "POST /files/permissions", "POST /files/mv", "GET /files/search", "POST /files/replace", "POST /files/upload",
		"GET /files/download", "PUT /files/content", "HEAD /files/content", "GET /files/tar", "POST /files/tar", "GET /files/watch",
		"GET /directories/list", "POST /directories", "DELETE /directories",
	} {
		method, path, _ := strings.Cut(route, " ")
		r, _ := http.NewRequest(method, somebody+path, nil)
		if _, pattern := mux.Handler(r); !strings.HasPrefix(pattern, method+" "+identityPrefix) {
			t.Errorf("%s: %q", route, pattern)
		}
	}
}

// A connection that an identity's handler ends is ended, and the daemon lives.
func TestIdentityPassesPanicsOn(t *testing.T) {
	if !squashable(t) {
		return
	}
	b := newBench(t)
	b.open(0o755)
	a := New(nil, "/")
	r, _ := http.NewRequest("GET", "/", nil)
	r.SetPathValue("uid", "1000")
	r.SetPathValue("gid", "1000")
	defer func() {
		if got := recover(); got != http.ErrAbortHandler {
			t.Errorf("%v", got)
		}
	}()
	_ = a.as(func(*API, http.ResponseWriter, *http.Request) error { panic(http.ErrAbortHandler) }, nil, r)
	t.Error("nothing was passed on")
}

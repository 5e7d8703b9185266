// SPDX-License-Identifier: Apache-2.0

package sandboxd_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"opensandbox.io/node/wire"
)

const isolatedRoute = "/v1/isolated/session"

// isolatedBox is a sandbox that can have isolated sessions. Its variables include one that looks like a secret.
func isolatedBox(t *testing.T) *box {
	t.Helper()
	r := request()
	r.Profile = wire.LaunchRequestProfileIsolated
	r.Env = map[string]string{"GITHUB_TOKEN": "hush", "COLOUR": "blue"}
	return newNode(t).create(r)
}

type fields = map[string]any

// isolate makes a session and gives the path of its routes.
func (b *box) isolate(body fields) string {
	b.t.Helper()
	var made wire.IsolatedSession
	if err := b.call("POST", isolatedRoute, body, &made); err != nil {
		b.t.Fatalf("session %v: %v", body, err)
	}
	return isolatedRoute + "/" + made.SessionID
}

func workspace(path, mode string) fields {
	return fields{"workspace": fields{"path": path, "mode": mode}}
}

// in runs code in a session.
func (b *box) in(session, code string) result {
	b.t.Helper()
	var text []byte
	if err := b.call("POST", session+"/run", fields{"code": code}, &text); err != nil {
		b.t.Fatalf("%s: %v", code, err)
	}
	return b.read(text)
}

// says runs code that must succeed and write exactly this.
func (b *box) says(session, code, want string) {
	b.t.Helper()
	if r := b.in(session, code); r.stdout != want || r.end.ExitCode == nil || *r.end.ExitCode != 0 {
		b.t.Errorf("%s: %q, want %q (%+v %s)", code, r.stdout, want, r.end, r.stderr)
	}
}

// refuses runs code that must not succeed.
func (b *box) refuses(session, code string) {
	b.t.Helper()
	if r := b.in(session, code); r.end.ExitCode != nil && *r.end.ExitCode == 0 {
		b.t.Errorf("%s: succeeded: %s", code, r.stdout)
	}
}

// wantStatus is the status and the code of a refusal.
func (b *box) wantStatus(method, path string, body any, status int, code wire.Code) {
	b.t.Helper()
	err := b.call(method, path, body, nil)
	var refused *apiError
	if !errors.As(err, &refused) || refused.Status != status || refused.Code != string(code) {
		b.t.Errorf("%s %s %v: %v, want %d %s", method, path, body, err, status, code)
	}
}

func (b *box) changes(session string) []string {
	b.t.Helper()
	var diff wire.IsolatedDiff
	if err := b.call("GET", session+"/diff", nil, &diff); err != nil {
		b.t.Fatal(err)
	}
	list := []string{}
	for _, c := range diff.Changes {
		list = append(list, fmt.Sprintf("%s %s %s", c.Change, c.Type, c.Path))
	}
	return list
}

func TestIsolatedSessions(t *testing.T) {
	b := isolatedBox(t)
	for name, test := range map[string]func(*box){
		"shell": isolatedShell, "confinement": isolatedConfinement, "refusals": isolatedRefusals, "changes": isolatedChanges,
		"planted links": isolatedLinks, "files": isolatedFiles, "background": isolatedBackground, "mounts": isolatedMounts,
		"user": isolatedUser, "end": isolatedEnd,
	} {
		t.Run(name, func(t *testing.T) {
			one := *b
			one.t = t
			test(&one)
		})
	}
}

func isolatedShell(b *box) {
	b.out("mkdir -p /shell/sub")
	s := b.isolate(workspace("/shell", "overlay"))
	b.says(s, "pwd", "/shell")
	b.in(s, "cd sub; a=1; export B=2; f() { echo $a$B; }")
	b.says(s, "pwd; f", "/shell/sub\n12")
	// The sandbox's environment, without what looks like a secret.
	b.says(s, `echo "$COLOUR-$GITHUB_TOKEN-"`, "blue--")
	open := b.isolate(fields{"workspace": fields{"path": "/shell"}, "profile": "balanced"})
	b.says(open, `echo "$COLOUR-$GITHUB_TOKEN-"`, "blue-hush-")
	allowed := b.isolate(fields{"workspace": fields{"path": "/shell"}, "env_passthrough": fields{"mode": "allow", "keys": []string{"GITHUB_TOKEN"}}})
	b.says(allowed, `echo "$COLOUR-$GITHUB_TOKEN-"`, "-hush-")
	var text []byte
	if err := b.call("POST", s+"/run", fields{"code": `echo "$Q"; exit 7`, "envs": fields{"Q": "it's"}}, &text); err != nil {
		b.t.Fatal(err)
	}
	if r := b.read(text); r.stdout != "it's" || *r.end.ExitCode != 7 {
		b.t.Errorf("%+v", r)
	}
	if err := b.call("POST", s+"/run", fields{"code": "sleep 1000", "timeout_seconds": 1}, &text); err != nil {
		b.t.Fatal(err)
	}
	if r := b.read(text); r.end.Reason != wire.CommandEndReasonTimedOut {
		b.t.Errorf("%+v", r.end)
	}
}

// isolatedConfinement: what the session's programs try and must not manage.
func isolatedConfinement(b *box) {
	b.out("mkdir -p /cage && echo hers > /cage/file && rm -rf /outside && mkdir /outside && chmod 777 /outside")
	s := b.isolate(workspace("/cage", "overlay"))
	other := b.isolate(workspace("/cage", "overlay"))
	b.in(other, "sleep 1234 & echo mine > /tmp/mine; echo mine > /dev/shm/mine")
	b.out("echo x > /dev/shm/of-the-sandbox; echo x > /tmp/of-the-sandbox")
	marker := strings.TrimSpace(b.out("(sleep 4321 >/dev/null 2>&1 & echo $!)"))
	b.says(s, `grep -E '^(CapInh|CapPrm|CapEff|CapAmb|NoNewPrivs|Seccomp):' /proc/self/status | tr -d ' \t\n'`,
		"CapInh:0000000000000000CapPrm:0000000000000000CapEff:0000000000000000CapAmb:0000000000000000NoNewPrivs:1Seccomp:2")
	for _, code := range []string{
		// Writing outside.
		"echo x > /outside/x", "echo x > /etc/x", "mkdir /x", "echo x > /usr/local/x", "rm -rf /etc/passwd", "chmod 700 /outside",
		"echo x > /proc/sys/kernel/hostname", "echo x > /sys/kernel/x", "echo x > /dev/mqueue/x", "mknod /tmp/d c 1 3", "chown 1000 /cage/file",
		// Leaving: new namespaces, mounts, a root of one's own.
		"unshare -U true", "unshare -m true", "mount -t tmpfs none /tmp", "mount -o remount,rw /", "mount -o remount,rw,bind /usr/local", "umount /work", "umount -l /proc", "chroot /tmp true",
		"nsenter -t 1 -m true", "ls /proc/1/root/", "ls /proc/1/fd/", "cat /proc/1/environ", "cat /proc/1/mem", "cat /proc/1/maps", "readlink /proc/1/exe", "ls /proc/1/cwd/",
		// The others.
		"kill -0 " + marker + "; ls /proc/" + marker, "pgrep -f 'sleep [14]'", "ls /tmp/mine", "ls /dev/shm/mine", "ls /dev/shm/of-the-sandbox", "ls /tmp/of-the-sandbox", "ls /proc/$PPID/",
		// The mounts that are covered.
		"ls /sys/proc", "cat /proc/kallsyms | grep .", "cat /proc/keys | grep .",
		// The network of the sandbox.
		"python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 44771), 1)'",
	} {
		b.refuses(s, code)
	}
	b.says(s, "echo own > /dev/shm/own && echo own > /tmp/own && cat /dev/shm/own", "own")
	b.says(s, "ls -A /proc/acpi /sys/firmware 2>/dev/null | grep -v : | tr -d '\\n'", "")
	for name := range strings.FieldsSeq(b.in(s, "for p in /proc/[0-9]*; do cat $p/comm; done").stdout) {
		if name != "bash" && name != "cat" && name != "exe" {
			b.t.Errorf("it sees the process %s", name)
		}
	}
	// Signals from inside do not end the first process.
	b.in(s, "kill -9 1; kill -TERM 1; kill -SEGV 1; kill -STOP 1; kill -INT 1")
	b.says(s, "cat file", "hers")
	b.out("test -z \"$(ls -A /outside)\" && kill -0 " + marker)
	// An ordinary command is as confined as ever.
	for _, command := range []string{"unshare -U true", "unshare -m true", "mount -t tmpfs none /mnt", "ls /sys/proc"} {
		b.fails(command)
	}
	// It does not get hold of what builds sessions, although it is of the same user.
	if got := b.out(seizeFirst); !strings.HasPrefix(got, "tried") || strings.Contains(got, "seized") {
		b.t.Errorf("first processes of sessions: %q", got)
	}
	if caps := b.out("grep CapEff /proc/self/status"); !strings.Contains(caps, "00000000000004fb") {
		b.t.Errorf("commands have other capabilities: %s", caps)
	}
	// The token is nowhere, and neither are execd's files.
	b.says(s, "ls -l /proc/self/fd | grep -c socket; true", "0")
}

// seizeFirst tries to trace every first process of a session and to read its memory.
const seizeFirst = `python3 - <<'E'
import ctypes, pathlib
libc = ctypes.CDLL(None)
for one in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        if one.joinpath("cmdline").read_bytes() != b"isolated\0":
            continue
    except OSError:
        continue
    print("tried")
    if libc.ptrace(0x4206, int(one.name), 0, 0) == 0: # PTRACE_SEIZE
        print("seized")
    try:
        one.joinpath("mem").open("rb")
        print("seized its memory")
    except OSError:
        pass
E`

func isolatedRefusals(b *box) {
	b.out("mkdir -p /plain && ln -sfn /etc /plain/link && touch /plain/file")
	for _, body := range []fields{
		{}, {"workspace": fields{"path": "relative"}}, workspace("/", "rw"), workspace("/proc", "ro"), workspace("/dev/shm", "rw"),
		workspace("/plain/../etc", "rw"), workspace("/missing", "rw"), workspace("/plain/link", "rw"), workspace("/plain/link/apt", "overlay"),
		workspace("/plain", "sideways"), workspace("/plain/file", "overlay"), workspace("/usr", "overlay"),
		{"workspace": fields{"path": "/plain"}, "profile": "lax"}, {"workspace": fields{"path": "/plain"}, "uid_mode": "userns"},
		{"workspace": fields{"path": "/plain"}, "overlays": []fields{{"path": "/plain"}}},
		{"overlays": []fields{{"path": "/plain", "mode": "rw", "persist": true}}},
		{"workspace": fields{"path": "/plain"}, "gid": 5}, {"workspace": fields{"path": "/plain"}, "uid": -1},
		{"workspace": fields{"path": "/plain"}, "idle_timeout_seconds": -1},
		{"workspace": fields{"path": "/plain"}, "extra_writable": []string{"/plain/link"}},
		{"workspace": fields{"path": "/plain"}, "binds": []fields{{"source": "/plain", "dest": "/not/there"}}},
	} {
		b.wantStatus("POST", isolatedRoute, body, http.StatusBadRequest, wire.CodeInvalidRequestBody)
	}
	nobody := isolatedRoute + "/00000000-0000-4000-8000-000000000000"
	for _, path := range []string{"", "/diff", "/runs/x", "/files/info"} {
		b.wantStatus("GET", nobody+path, nil, http.StatusNotFound, wire.CodeContextNotFound)
	}
	s := b.isolate(workspace("/plain", "rw"))
	b.wantStatus("GET", s+"/diff", nil, http.StatusBadRequest, wire.CodeInvalidRequestBody)
	b.wantStatus("POST", s+"/run", fields{"code": ""}, http.StatusBadRequest, wire.CodeInvalidRequestBody)
	b.wantStatus("POST", s+"/run", fields{"code": "true", "envs": fields{"A B": "x"}}, http.StatusBadRequest, wire.CodeInvalidRequestBody)
	b.wantStatus("GET", s+"/runs/none", nil, http.StatusNotFound, wire.CodeCommandNotFound)
}

func isolatedChanges(b *box) {
	b.out(`mkdir -p /ws/keep /ws/old /ws/swap && cd /ws && echo one > one && echo two > two && echo three > keep/three && echo old > old/old &&
		echo inside > swap/inside && ln -s one link && chmod 640 one && touch -d 2001-01-01 two`)
	s := b.isolate(workspace("/ws", "overlay"))
	if got := b.changes(s); len(got) != 0 {
		b.t.Errorf("a new session has changes: %q", got)
	}
	b.in(s, `echo new > new; echo more >> one; rm two; rm -r old; rm -r swap; mkdir swap; echo other > swap/other; ln -sfn keep link
		: >> keep/three; mkdir deep; mkdir deep/er; echo x > deep/er/x; cp /bin/true suid; chmod 4755 suid; mkfifo pipe
		python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("sock")'`)
	want := []string{
		"created directory /ws/deep", "created directory /ws/deep/er", "created file /ws/deep/er/x", "modified symlink /ws/link", "created file /ws/new",
		"deleted directory /ws/old", "modified file /ws/one", "created other /ws/pipe", "created other /ws/sock", "created file /ws/suid",
		"created file /ws/swap/other", "deleted file /ws/swap/inside", "deleted file /ws/two",
	}
	if got := b.changes(s); !slices.Equal(got, want) {
		b.t.Errorf("changes are\n%q, want\n%q", got, want)
	}
	if got := b.out("cd /ws; ls; cat one"); got != "keep\nlink\nold\none\nswap\ntwo\none" {
		b.t.Errorf("the sandbox sees %q", got)
	}
	var archive []byte
	if err := b.call("GET", s+"/diff?format=tar", nil, &archive); err != nil {
		b.t.Fatal(err)
	}
	names := []string{}
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			b.t.Fatal(err)
		}
		names = append(names, h.Name)
	}
	inTar := []string{
		"ws/deep/", "ws/deep/er/", "ws/deep/er/x", "ws/link", "ws/new", "ws/.wh.old", "ws/one", "ws/suid", "ws/swap/other", "ws/swap/.wh.inside", "ws/.wh.two",
	}
	if !slices.Equal(names, inTar) {
		b.t.Errorf("the archive has\n%q, want\n%q", names, inTar)
	}
	var run wire.IsolatedRun
	if err := b.call("POST", s+"/run", fields{"code": "sleep 1000", "background": true}, &run); err != nil {
		b.t.Fatal(err)
	}
	b.wantStatus("POST", s+"/commit", nil, http.StatusConflict, wire.CodeSessionBusy)
	b.in(s, "pkill sleep")
	b.finished(s, run.RunID)
	var done wire.IsolatedCommit
	if err := b.call("POST", s+"/commit", nil, &done); err != nil {
		b.t.Fatal(err)
	}
	if done.Created != 7 || done.Modified != 2 || done.Deleted != 3 || !slices.Equal(done.Skipped, []string{"/ws/sock"}) {
		b.t.Errorf("committed %+v", done)
	}
	got := b.out("cd /ws; find . | sort | tr '\\n' ' '; cat one; readlink link; stat -c '%a' one suid; cat swap/other deep/er/x")
	if got != "./deep ./deep/er ./deep/er/x ./keep ./keep/three ./link ./new ./one ./pipe ./suid ./swap ./swap/other one\nmore\nkeep\n640\n755\nother\nx" &&
		got != ". ./deep ./deep/er ./deep/er/x ./keep ./keep/three ./link ./new ./one ./pipe ./suid ./swap ./swap/other one\nmore\nkeep\n640\n755\nother\nx" {
		b.t.Errorf("after the commit the sandbox has %q", got)
	}
	if got := b.changes(s); !slices.Equal(got, []string{"created other /ws/sock"}) {
		b.t.Errorf("after the commit there are changes: %q", got)
	}
	b.says(s, "cat one swap/other; ls old two 2>&1 | wc -l", "one\nmore\nother\n2")
	b.in(s, "echo again > again")
	if err := b.call("POST", s+"/commit", nil, &done); err != nil || b.out("cat /ws/again") != "again" {
		b.t.Errorf("the second commit: %v", err)
	}
}

// isolatedLinks: links that a session, or the sandbox, has planted where a commit writes.
func isolatedLinks(b *box) {
	b.out("mkdir -p /victim /trap/dir && echo safe > /victim/passwd && echo x > /trap/dir/passwd && ln -sfn /victim /trap/away && echo y > /trap/file")
	s := b.isolate(workspace("/trap", "overlay"))
	// In place of a link a directory, in place of files links.
	b.in(s, `rm away; mkdir away; echo evil > away/passwd; rm -r dir; ln -s /victim dir; rm file; ln -s /victim/passwd file; ln -s ../../../victim up`)
	if err := b.call("POST", s+"/commit", nil, nil); err != nil {
		b.t.Fatal(err)
	}
	if got := b.out("cat /victim/passwd; ls /victim; readlink /trap/dir /trap/file /trap/up; test -L /trap/away || cat /trap/away/passwd"); got != "safe\npasswd\n/victim\n/victim/passwd\n../../../victim\nevil" {
		b.t.Errorf("got %q", got)
	}
	// While the session thinks of a directory, the sandbox puts a link there.
	b.out("mkdir -p /race/dir && echo x > /race/dir/passwd")
	s = b.isolate(workspace("/race", "overlay"))
	b.in(s, "echo evil > dir/passwd; echo evil > dir/more")
	b.out("rm -r /race/dir && ln -s /victim /race/dir")
	_ = b.call("POST", s+"/commit", nil, nil)
	if got := b.out("cat /victim/passwd; ls /victim"); got != "safe\npasswd" {
		b.t.Errorf("the commit followed a link: %q", got)
	}
	// A session with a path that another one has exchanged for a link.
	b.out("mkdir -p /shared/sub")
	rw := b.isolate(workspace("/shared", "rw"))
	b.in(rw, "rmdir sub && ln -s /victim sub")
	b.wantStatus("POST", isolatedRoute, workspace("/shared/sub", "rw"), http.StatusBadRequest, wire.CodeInvalidRequestBody)
}

func isolatedFiles(b *box) {
	b.out("mkdir -p /files && echo below > /files/below && ln -sfn / /files/root")
	s := b.isolate(workspace("/files", "overlay"))
	var content []byte
	put := func(path, text string) error {
		var up bytes.Buffer
		fmt.Fprintf(&up, "--b\r\nContent-Disposition: form-data; name=\"metadata\"; filename=\"metadata\"\r\n\r\n{\"path\":%q,\"mode\":644}\r\n", path)
		fmt.Fprintf(&up, "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n%s\r\n--b--\r\n", text)
		req, err := http.NewRequest("POST", "http://execd"+s+"/files/upload", &up)
		if err != nil {
			return err
		}
		req.Header = credentials()
		req.Header.Set("Content-Type", "multipart/form-data; boundary=b")
		res, err := b.client.Do(req)
		if err != nil {
			return err
		}
		defer res.Body.Close()
		text2, _ := io.ReadAll(res.Body)
		if res.StatusCode != 200 {
			return fmt.Errorf("%d %s", res.StatusCode, text2)
		}
		return nil
	}
	if err := put("/files/new dir/uploaded", "hello"); err != nil {
		b.t.Fatal(err)
	}
	b.says(s, "cat 'new dir/uploaded'", "hello")
	b.in(s, "echo made > made; rm below")
	get := func(path string) error {
		return b.call("GET", s+"/files/download?path="+url.QueryEscape(path), nil, &content)
	}
	if err := get("/files/made"); err != nil || string(content) != "made\n" {
		b.t.Errorf("%v %q", err, content)
	}
	if err := get("/files/below"); err == nil {
		b.t.Error("what the session deleted is still there")
	}
	for _, path := range []string{"/etc/x", "/outside", "/files/root/etc/x"} {
		if put(path, "x") == nil {
			b.t.Errorf("%s could be written", path)
		}
	}
	var list []wire.FileInfo
	if err := b.call("GET", s+"/directories/list?path=/files", nil, &list); err != nil || len(list) != 3 {
		b.t.Errorf("%v %+v", err, list)
	}
	b.fails("test -e '/files/new dir'")
	if err := b.call("DELETE", s+"/directories?path=/files/new+dir", nil, nil); err != nil {
		b.t.Error(err)
	}
	// Nothing of execd is behind /proc.
	for _, path := range []string{"/proc/1/environ", "/proc/self/environ", "/proc/self/fd/3"} {
		if get(path) == nil {
			b.t.Errorf("%s could be read: %q", path, content)
		}
	}
}

// finished waits for the end of a run in the background.
func (b *box) finished(session, run string) wire.IsolatedRunStatus {
	b.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		var status wire.IsolatedRunStatus
		if err := b.call("GET", session+"/runs/"+run, nil, &status); err != nil {
			b.t.Fatal(err)
		}
		if !status.Running {
			return status
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("the run does not end: %+v", status)
		}
		time.Sleep(5 * time.Millisecond) // the contract has no other way to wait
	}
}

func isolatedBackground(b *box) {
	b.out("mkdir -p /bg/sub")
	s := b.isolate(workspace("/bg", "overlay"))
	b.in(s, "cd sub")
	var run wire.IsolatedRun
	if err := b.call("POST", s+"/run", fields{"code": "pwd; echo $A; echo err >&2; exit 3", "envs": fields{"A": "b"}, "background": true}, &run); err != nil {
		b.t.Fatal(err)
	}
	status := b.finished(s, run.RunID)
	if status.ExitCode == nil || *status.ExitCode != 3 || status.FinishedAt.IsZero() {
		b.t.Errorf("%+v", status)
	}
	for cursor, want := range map[int]string{0: "/bg/sub\nb\nerr\n", 8: "b\nerr\n", 14: "", 99: ""} {
		var text []byte
		if err := b.call("GET", fmt.Sprintf("%s/runs/%s/logs?cursor=%d", s, run.RunID, cursor), nil, &text); err != nil || string(text) != want {
			b.t.Errorf("from %d: %v %q", cursor, err, text)
		}
	}
}

func isolatedMounts(b *box) {
	b.out(`mkdir -p /m/ws /m/extra /m/bound /m/ro /m/at /m/seen && echo r > /m/ro/r && echo bound > /m/bound/f && chmod 777 /m/* && echo shared > /tmp/shared`)
	s := b.isolate(fields{
		"profile": "balanced", "overlays": []fields{{"path": "/m/ws", "mode": "rw"}, {"path": "/m/ro", "mode": "ro"}},
		"extra_writable": []string{"/m/extra"},
		"binds":          []fields{{"source": "/m/bound", "dest": "/m/at"}, {"source": "/m/bound", "dest": "/m/seen", "readonly": true}},
	})
	b.says(s, "echo 1 > /m/ws/w && echo 2 > /m/extra/e && echo 3 > /m/at/a && cat /m/seen/f /m/ro/r /tmp/shared && echo 4 > /tmp/balanced", "bound\nr\nshared")
	for _, code := range []string{"echo x > /m/ro/x", "echo x > /m/seen/x", "echo x > /m/bound/x", "rm /m/ro/r"} {
		b.refuses(s, code)
	}
	if got := b.out("cat /m/ws/w /m/extra/e /m/bound/a /tmp/balanced"); got != "1\n2\n3\n4" {
		b.t.Errorf("the sandbox has %q", got)
	}
	strict := b.isolate(fields{
		"workspace": fields{"path": "/tmp"}, "overlays": []fields{{"path": "/m/ws"}, {"path": "/m/extra", "persist": false}},
		"binds": []fields{{"source": "/m/bound", "dest": "/tmp/made/here"}},
	})
	b.says(strict, "cat shared /m/ws/w made/here/f; echo 5 > made/here/five; echo x > /m/extra/x; echo y > /m/ws/y; echo z > z", "shared\n1\nbound")
	got := b.changes(strict)
	if !slices.Contains(got, "created file /m/ws/y") || !slices.Contains(got, "created file /tmp/z") || slices.ContainsFunc(got, func(c string) bool { return strings.Contains(c, "/m/extra") }) {
		b.t.Errorf("changes are %q", got)
	}
	if got := b.out("cat /m/bound/five; ls /tmp/z /m/ws/y 2>&1 | wc -l"); got != "5\n2" {
		b.t.Errorf("got %q", got)
	}
}

func isolatedUser(b *box) {
	b.out("mkdir -p /u && chmod 777 /u && echo secret > /u/secret && chmod 600 /u/secret")
	s := b.isolate(fields{"workspace": fields{"path": "/u"}, "uid": 1000, "gid": 1000})
	b.says(s, "id -u; id -g; echo mine > mine; stat -c %u mine", "1000\n1000\n1000")
	b.refuses(s, "cat secret")
	var content []byte
	if b.call("GET", s+"/files/download?path=/u/secret", nil, &content) == nil {
		b.t.Error("the file routes read what the user cannot")
	}
	if err := b.call("POST", s+"/commit", nil, nil); err != nil {
		b.t.Fatal(err)
	}
	if got := b.out("stat -c %u:%g:%a /u/mine /u/secret"); got != "1000:1000:644\n0:0:600" {
		b.t.Errorf("got %q", got)
	}
}

// isolatedEnd: all processes of a session end with it, however many there are and whatever they do.
func isolatedEnd(b *box) {
	b.out("mkdir -p /end")
	s := b.isolate(workspace("/end", "overlay"))
	b.in(s, `setsid sh -c 'trap "" TERM HUP; exec sleep 77777' >/dev/null 2>&1 &`)
	b.in(s, `cat > /tmp/bomb <<'X'
[ $1 -gt 0 ] || exec sleep 77777
setsid sh /tmp/bomb $(($1-1)) & sh /tmp/bomb $(($1-1)) & exec sleep 77777
X
sh /tmp/bomb 6 >/dev/null 2>&1 & true`)
	var run wire.IsolatedRun
	if err := b.call("POST", s+"/run", fields{"code": "sleep 77777", "background": true}, &run); err != nil {
		b.t.Fatal(err)
	}
	b.out("pgrep -fx 'sleep 77777' > /dev/null")
	if err := b.call("DELETE", s, nil, nil); err != nil {
		b.t.Fatal(err)
	}
	b.fails("pgrep -fx 'sleep 77777'")
	b.wantStatus("GET", s, nil, http.StatusNotFound, wire.CodeContextNotFound)
	b.wantStatus("DELETE", s, nil, http.StatusNotFound, wire.CodeContextNotFound)
	// Idle.
	short := b.isolate(fields{"workspace": fields{"path": "/end"}, "idle_timeout_seconds": 1})
	b.in(short, "(sleep 66666 >/dev/null 2>&1 &)")
	deadline := time.Now().Add(patience)
	var state wire.IsolatedSession
	for state.Status != wire.IsolatedSessionStatusDestroyed {
		if err := b.call("GET", short, nil, &state); err != nil || time.Now().After(deadline) {
			b.t.Fatalf("%v %+v", err, state)
		}
		time.Sleep(20 * time.Millisecond) // nothing tells of it
	}
	b.fails("pgrep -fx 'sleep 66666'")
	b.wantStatus("POST", short+"/run", fields{"code": "true"}, http.StatusNotFound, wire.CodeContextNotFound)
	// Its first process is killed from outside, as by the kernel when memory runs out.
	dead := b.isolate(workspace("/end", "overlay"))
	b.in(dead, "sleep 55555 >/dev/null 2>&1 &")
	b.out("kill -9 $(pgrep -fx isolated | tail -1)")
	status := map[string]wire.IsolatedSessionSummaryStatus{}
	for status[dead] != wire.IsolatedSessionSummaryStatusDead {
		var list wire.IsolatedSessionList
		if err := b.call("GET", "/v1/isolated/sessions", nil, &list); err != nil || time.Now().After(deadline) {
			b.t.Fatalf("%v %+v", err, list)
		}
		for _, one := range list.Sessions {
			status[isolatedRoute+"/"+one.SessionID] = one.Status
		}
	}
	if status[short] != wire.IsolatedSessionSummaryStatusDestroyed {
		b.t.Errorf("%+v", status)
	}
	b.fails("pgrep -fx 'sleep 55555'")
	b.wantStatus("POST", dead+"/run", fields{"code": "true"}, http.StatusNotFound, wire.CodeContextNotFound)
	if err := b.call("DELETE", dead, nil, nil); err != nil {
		b.t.Error(err)
	}
}

// A sandbox that was not made for it says so, and how to get one.
func TestIsolatedSessionsNeedTheirProfile(t *testing.T) {
	b := newNode(t).create(request())
	var can wire.IsolatedCapabilities
	if err := b.call("GET", "/v1/isolated/capabilities", nil, &can); err != nil || can.Available ||
		!strings.Contains(can.Message, "bootstrap.execd.isolation=enable") || !strings.Contains(can.Message, "without the extension") || strings.Contains(can.Message, "device") {
		t.Errorf("%v %+v", err, can)
	}
	b.wantStatus("POST", isolatedRoute, workspace("/tmp", "rw"), http.StatusServiceUnavailable, wire.CodeNotSupported)
	b.wantStatus("GET", "/v1/isolated/sessions", nil, http.StatusServiceUnavailable, wire.CodeNotSupported)
	b.wantStatus("GET", isolatedRoute+"/x", nil, http.StatusServiceUnavailable, wire.CodeNotSupported)
}

// A rootless sandbox has one user, who owns every namespace that execd could make for a session.
func TestIsolatedSessionsRootless(t *testing.T) {
	n := rootlessNode(t)
	r := request()
	r.Profile = wire.LaunchRequestProfileIsolated
	var refused *apiError
	if err := n.call("POST", "/sandboxes", r, nil); !errors.As(err, &refused) || refused.Code != string(wire.CodeSandboxApiNotSupported) || !strings.Contains(refused.Hint, "as root") {
		t.Errorf("%+v", err)
	}
	b := n.create(request())
	var can wire.IsolatedCapabilities
	if err := b.call("GET", "/v1/isolated/capabilities", nil, &can); err != nil || can.Available || !strings.Contains(can.Message, "rootless") {
		t.Errorf("%v %+v", err, can)
	}
	b.wantStatus("POST", isolatedRoute, workspace("/tmp", "rw"), http.StatusServiceUnavailable, wire.CodeNotSupported)
	b.wantStatus("POST", isolatedRoute, fields{}, http.StatusServiceUnavailable, wire.CodeNotSupported)
	b.wantStatus("GET", "/v1/isolated/sessions", nil, http.StatusServiceUnavailable, wire.CodeNotSupported)
	b.wantStatus("GET", isolatedRoute+"/x/diff", nil, http.StatusServiceUnavailable, wire.CodeNotSupported)
}

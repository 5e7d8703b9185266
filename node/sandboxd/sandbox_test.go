// SPDX-License-Identifier: Apache-2.0

package sandboxd_test

import (
	"bufio"
	"context"
	"encoding/json"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"opensandbox.io/node/wire"
)

func TestCreateCommandFileDelete(t *testing.T) {
	n := newNode(t)
	r := request("sh", "-c", "echo up; exec sleep infinity")
	r.Env = map[string]string{"GREETING": "hello", "PYTHON_VERSION": "2.7"}
	b := n.create(r)
	if len(b.Warnings) != 1 || !strings.Contains(b.Warnings[0], "PYTHON_VERSION") {
		t.Errorf("warnings %q", b.Warnings)
	}
	if b.State != wire.ReportStateRunning || b.Image != "host" || b.PID == nil || b.APISocket == "" {
		t.Fatalf("report %+v", b.Report)
	}
	stages := []string{"slot", "cgroup", "clone", "root", "enter", "ready", "total"}
	if _, pooled := b.Timings["pooled"]; pooled {
		stages = []string{"pooled", "ready", "total"}
	}
	for _, stage := range stages {
		if b.Timings[stage] <= 0 {
			t.Errorf("no time for stage %s in %v", stage, b.Timings)
		}
	}
	t.Logf("timings %v", b.Timings)
	if out := b.out("echo $GREETING; pwd; hostname"); out != "hello\n/workspace\n"+b.ID[:12] {
		t.Errorf("output %q", out)
	}
	b.out("echo kept > /workspace/file && mkdir -p /usr/local/lib/own && echo x > /usr/local/lib/own/y")
	var text []byte
	if err := b.call("GET", "/files/download?path=/workspace/file", nil, &text); err != nil || string(text) != "kept\n" {
		t.Errorf("file %q, %v", text, err)
	}
	if err := call(b.client, "GET", "/ping", nil, nil, http.Header{"X-Execd-Access-Token": {"wrong"}}); err == nil {
		t.Error("a wrong token was accepted")
	}
	if err := n.call("GET", "/sandboxes/"+b.ID+"/output", nil, &text); err != nil || string(text) != "up\n" {
		t.Errorf("output of the entry point: %q, %v", text, err)
	}
	var list wire.ReportList
	if err := n.call("GET", "/sandboxes", nil, &list); err != nil || len(list.Items) != 1 {
		t.Errorf("list %+v, %v", list, err)
	}
	n.delete(b.ID)
	n.checkClean()
	wantCode(t, n.call("DELETE", "/sandboxes/"+b.ID, nil, nil), wire.CodeSandboxNotFound)
	_, err := n.get(b.ID)
	wantCode(t, err, wire.CodeSandboxNotFound)
}

func TestBadRequestsAreRefusedAndLeaveNothing(t *testing.T) {
	n := newNode(t)
	whole := func(change func(m map[string]any)) string {
		text, _ := json.Marshal(request())
		var m map[string]any
		json.Unmarshal(text, &m)
		change(m)
		text, _ = json.Marshal(m)
		return string(text)
	}
	for name, c := range map[string]struct {
		body string
		code wire.Code
		says string
	}{
		"not JSON":         {"{", wire.CodeSandboxInvalidParameter, ""},
		"unknown field":    {whole(func(m map[string]any) { m["mounts"] = []string{"/"} }), wire.CodeSandboxInvalidParameter, "mounts"},
		"id is a path":     {whole(func(m map[string]any) { m["id"] = "../../../../../../../../etc/passwd..." }), wire.CodeSandboxInvalidParameter, "UUID"},
		"upper case":       {whole(func(m map[string]any) { m["id"] = strings.ToUpper(uuid()) + "" }), wire.CodeSandboxInvalidParameter, "UUID"},
		"no token":         {whole(func(m map[string]any) { m["tokenSha256"] = "abc" }), wire.CodeSandboxInvalidParameter, "tokenSha256"},
		"zero memory":      {whole(func(m map[string]any) { m["limits"] = map[string]any{"memoryBytes": 0} }), wire.CodeSandboxInvalidParameter, "memoryBytes"},
		"tiny memory":      {whole(func(m map[string]any) { m["limits"] = map[string]any{"memoryBytes": 4096} }), wire.CodeSandboxInvalidParameter, "memoryBytes"},
		"absurd memory":    {whole(func(m map[string]any) { m["limits"] = map[string]any{"memoryBytes": int64(1) << 62} }), wire.CodeSandboxInvalidParameter, "memoryBytes"},
		"negative cpu":     {whole(func(m map[string]any) { m["limits"] = map[string]any{"cpuMillis": -5} }), wire.CodeSandboxInvalidParameter, "cpuMillis"},
		"fractional pids":  {whole(func(m map[string]any) { m["limits"] = map[string]any{"pids": 10.5} }), wire.CodeSandboxInvalidParameter, ""},
		"unknown limit":    {whole(func(m map[string]any) { m["limits"] = map[string]any{"gpu": 1} }), wire.CodeSandboxInvalidParameter, "gpu"},
		"unknown profile":  {whole(func(m map[string]any) { m["profile"] = "none" }), wire.CodeSandboxInvalidParameter, "profile"},
		"unknown image":    {whole(func(m map[string]any) { m["image"] = "python:3.12" }), wire.CodeImageNotFound, "host"},
		"empty entrypoint": {whole(func(m map[string]any) { m["entrypoint"] = []string{} }), wire.CodeSandboxInvalidEntrypoint, ""},
		"NUL":              {whole(func(m map[string]any) { m["entrypoint"] = []string{"sh", "a\x00b"} }), wire.CodeSandboxInvalidEntrypoint, "NUL"},
		"bad variable":     {whole(func(m map[string]any) { m["env"] = map[string]string{"A=B": "c"} }), wire.CodeSandboxInvalidParameter, "env"},
		"past deadline":    {whole(func(m map[string]any) { m["deadline"] = "2001-01-01T00:00:00Z" }), wire.CodeSandboxInvalidExpiration, "passed"},
		"missing program":  {whole(func(m map[string]any) { m["entrypoint"] = []string{"no-such-program"} }), wire.CodeSandboxInvalidEntrypoint, "no-such-program"},
		"missing path":     {whole(func(m map[string]any) { m["entrypoint"] = []string{"/opt/nothing"} }), wire.CodeSandboxInvalidEntrypoint, "/opt/nothing"},
		"a directory":      {whole(func(m map[string]any) { m["entrypoint"] = []string{"/usr"} }), wire.CodeSandboxInvalidEntrypoint, "directory"},
		"not executable":   {whole(func(m map[string]any) { m["entrypoint"] = []string{"/etc/passwd"} }), wire.CodeSandboxInvalidEntrypoint, "executable"},
	} {
		t.Run(name, func(t *testing.T) {
			failure := wantCode(t, n.call("POST", "/sandboxes", c.body, nil), c.code)
			if !strings.Contains(failure.Message, c.says) || failure.Hint == "" {
				t.Errorf("message %q, hint %q", failure.Message, failure.Hint)
			}
		})
	}
	n.checkClean()

	b := n.create(request())
	again := request()
	again.ID = b.ID
	wantCode(t, n.call("POST", "/sandboxes", again, nil), wire.CodeSandboxInvalidParameter)
	if err := b.ping(); err != nil {
		t.Errorf("a refused twin hurt the first: %v", err)
	}
	n.delete(b.ID)
	n.checkClean()
}

func TestCreatesAreRefusedBelowTheReserve(t *testing.T) {
	n := newNode(t, "--free-space-reserve", "9223372036854775807")
	wantCode(t, n.call("POST", "/sandboxes", request(), nil), wire.CodeNodeDiskReserve)
	n.checkClean()
}

func TestEndsAreTypedAndKeptUntilDeleted(t *testing.T) {
	n := newNode(t)
	events := n.watch()
	if e := events.next(); e.Type != wire.EventTypeHello {
		t.Fatalf("first event %+v", e)
	}
	b := n.create(request("sh", "-c", "echo last words; while ! [ -e /workspace/go ]; do sleep 0.01; done; exit 7"))
	// How this command ends is nobody's business: the sandbox goes with it.
	b.call("POST", "/command", map[string]any{"command": "touch /workspace/go"}, nil)
	e := events.next()
	if e.Type != wire.EventTypeEnded || e.Report.ID != b.ID || e.Report.End.Reason != wire.NodeEndReasonExited || *e.Report.End.ExitCode != 7 {
		t.Fatalf("event %+v", e)
	}
	r := n.ended(b.ID)
	if r.End.Reason != wire.NodeEndReasonExited || r.End.ExitCode == nil || *r.End.ExitCode != 7 || r.End.PeakMemoryBytes == nil || r.PID != nil || r.APISocket != "" {
		t.Errorf("report %+v end %+v", r, r.End)
	}
	for _, gone := range []string{n.state + "/fs/sandboxes/" + b.ID, n.run + "/" + b.ID, n.state + "/spool/" + b.ID} {
		if _, err := os.Stat(gone); err == nil {
			t.Errorf("%s is still there after the end", gone)
		}
	}
	var text []byte
	if err := n.call("GET", "/sandboxes/"+b.ID+"/output", nil, &text); err != nil || string(text) != "last words\n" {
		t.Errorf("output %q, %v", text, err)
	}
	// A second watcher hears of it until it is acknowledged.
	second := n.watch()
	second.next()
	if e := second.next(); e.Type != wire.EventTypeEnded || e.Report.ID != b.ID {
		t.Errorf("event %+v", e)
	}
	if err := n.call("POST", "/sandboxes/"+b.ID+"/acknowledge", nil, nil); err != nil {
		t.Error(err)
	}
	wantCode(t, n.call("PUT", "/sandboxes/"+b.ID+"/deadline", wire.DeadlineRequest{}, nil), wire.CodeSandboxNotRunning)
	n.delete(b.ID)
	n.checkClean()
}

func TestAQuickEntryPointIsAnEndNotAnError(t *testing.T) {
	n := newNode(t)
	for range 5 {
		b := n.create(request("sh", "-c", "echo quick; exit 3"))
		r := n.ended(b.ID)
		if r.End.Reason != wire.NodeEndReasonExited || *r.End.ExitCode != 3 {
			t.Errorf("end %+v", r.End)
		}
		var text []byte
		if n.call("GET", "/sandboxes/"+b.ID+"/output", nil, &text); string(text) != "quick\n" {
			t.Errorf("output %q", text)
		}
		n.delete(b.ID)
	}
	b := n.create(request("sh", "-c", "kill -TERM $$"))
	if r := n.ended(b.ID); r.End.Reason != wire.NodeEndReasonSignalled || r.End.Signal != "SIGTERM" {
		t.Errorf("end %+v", r.End)
	}
	n.delete(b.ID)
	n.checkClean()
}

func TestDeadlineWithoutAServer(t *testing.T) {
	n := newNode(t, "--deadline-grace", "100ms")
	r := request()
	r.Deadline = time.Now().Add(time.Second)
	b := n.create(r)
	end := n.ended(b.ID)
	if end.End.Reason != wire.NodeEndReasonExpired || end.End.At.Before(r.Deadline) {
		t.Errorf("end %+v, deadline %v", end.End, r.Deadline)
	}
	n.delete(b.ID)

	// While a server is connected the deadline is its business.
	events := n.watch()
	events.next()
	r = request()
	r.Deadline = time.Now().Add(200 * time.Millisecond)
	b = n.create(r)
	time.Sleep(600 * time.Millisecond) // there is no event for something that must not happen
	if err := b.ping(); err != nil {
		t.Fatalf("ended although a server is connected: %v", err)
	}
	// A deadline that is moved away does not fire when the server leaves.
	if err := n.call("PUT", "/sandboxes/"+b.ID+"/deadline", wire.DeadlineRequest{Deadline: time.Now().Add(time.Hour)}, nil); err != nil {
		t.Fatal(err)
	}
	events.close()
	time.Sleep(400 * time.Millisecond)
	if err := b.ping(); err != nil {
		t.Fatalf("ended by a deadline that was moved: %v", err)
	}
	if err := n.call("PUT", "/sandboxes/"+b.ID+"/deadline", wire.DeadlineRequest{Deadline: time.Now()}, nil); err != nil {
		t.Fatal(err)
	}
	if end := n.ended(b.ID); end.End.Reason != wire.NodeEndReasonExpired {
		t.Errorf("end %+v", end.End)
	}
	n.delete(b.ID)
	n.checkClean()
}

func TestOwnLife(t *testing.T) {
	n := newNode(t, "--idle-exit", "300ms")
	server := n.watch()
	server.next()
	// A second one on the same state directory says so.
	second := exec.Command(programs+"/sandboxd", "--state-dir", n.state, "--run-dir", n.run, "--blocks-dir", n.blocks)
	out, _ := second.Output()
	if second.ProcessState.ExitCode() != 3 || !strings.Contains(string(out), "error") || !strings.Contains(string(out), "another sandboxd") {
		t.Errorf("second sandboxd: exit %d, %s", second.ProcessState.ExitCode(), out)
	}
	b := n.create(request())
	server.close()
	wantCode(t, n.call("POST", "/shutdown", wire.ShutdownRequest{When: wire.ShutdownRequestWhenIdle}, nil), wire.CodeNodeBusy)
	time.Sleep(600 * time.Millisecond) // it must not leave while it holds a sandbox
	if err := b.ping(); err != nil {
		t.Fatal(err)
	}
	n.delete(b.ID)
	if err := n.leaves(); err != nil {
		t.Fatalf("idle: %v", err)
	}
	if _, err := os.Stat(n.run); err == nil {
		t.Error("the run directory is left")
	}

	n.flags = nil
	n.start()
	if err := n.call("POST", "/shutdown", wire.ShutdownRequest{When: wire.ShutdownRequestWhenIdle}, nil); err != nil {
		t.Fatal(err)
	}
	if err := n.leaves(); err != nil {
		t.Fatalf("asked to leave: %v", err)
	}

	n.start()
	b = n.create(request())
	if err := n.call("POST", "/shutdown", wire.ShutdownRequest{When: wire.ShutdownRequestWhenAll}, nil); err != nil {
		t.Fatal(err)
	}
	if err := n.leaves(); err != nil {
		t.Fatal(err)
	}
	if len(n.initPIDs()) != 0 {
		t.Error("a sandbox outlived shutdown all")
	}
	n.start()
	if r := n.ended(b.ID); r.End.Reason != wire.NodeEndReasonKilled {
		t.Errorf("end %+v", r.End)
	}
	n.delete(b.ID)
	n.checkClean()
}

func TestManyAtOnce(t *testing.T) {
	n := newNode(t)
	const count = 16
	boxes := make(chan string, count)
	var group sync.WaitGroup
	for range count {
		group.Go(func() {
			var r wire.Report
			if err := n.call("POST", "/sandboxes", request(), &r); err != nil {
				t.Error(err)
				return
			}
			boxes <- r.ID
		})
	}
	group.Wait()
	close(boxes)
	users := map[string]bool{}
	for id := range boxes {
		r, _ := n.get(id)
		users[r.Isolation["users"].(string)] = true
		group.Go(func() {
			if err := n.call("DELETE", "/sandboxes/"+id, nil, nil); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if len(users) != count {
		t.Errorf("%d different uid ranges for %d sandboxes: %v", len(users), count, maps.Keys(users))
	}
	n.checkClean()
}

func TestAClientThatGoesAwayLeavesNothing(t *testing.T) {
	n := newNode(t)
	for i := range 20 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*1500*time.Microsecond)
		text, _ := json.Marshal(request())
		r, _ := http.NewRequestWithContext(ctx, "POST", "http://node/sandboxes", strings.NewReader(string(text)))
		if response, err := n.client.Do(r); err == nil {
			var report wire.Report
			json.NewDecoder(response.Body).Decode(&report)
			response.Body.Close()
		}
		cancel()
	}
	// Whoever made it into the list is running and can be deleted; the others are gone.
	var list wire.ReportList
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		if err := n.call("GET", "/sandboxes", nil, &list); err != nil {
			t.Fatal(err)
		}
		creating := 0
		for _, r := range list.Items {
			if r.State == wire.ReportStateCreating {
				creating++
			}
		}
		if creating == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d creates hang", creating)
		}
	}
	t.Logf("%d of 20 got through", len(list.Items))
	for _, r := range list.Items {
		n.delete(r.ID)
	}
	n.checkClean()
}

// stream is an open /events connection.
type stream struct {
	t      *testing.T
	cancel context.CancelFunc
	events chan wire.Event
}

func (n *node) watch() *stream {
	n.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r, _ := http.NewRequestWithContext(ctx, "GET", "http://node/events", nil)
	response, err := n.client.Do(r)
	if err != nil {
		cancel()
		n.t.Fatal(err)
	}
	s := &stream{t: n.t, cancel: cancel, events: make(chan wire.Event, 100)}
	go func() {
		defer close(s.events)
		defer response.Body.Close()
		lines := bufio.NewScanner(response.Body)
		for lines.Scan() {
			var e wire.Event
			if json.Unmarshal(lines.Bytes(), &e) == nil {
				s.events <- e
			}
		}
	}()
	n.t.Cleanup(cancel)
	return s
}

func (s *stream) next() wire.Event {
	s.t.Helper()
	select {
	case e := <-s.events:
		return e
	case <-time.After(patience):
		s.t.Fatal("no event")
	}
	return wire.Event{}
}

func (s *stream) close() { s.cancel() }

func TestIngress(t *testing.T) {
	n := newNode(t)
	port := freePort(t)
	var first wire.Ingress
	if err := n.call("PUT", "/ingress", wire.IngressRequest{Hosts: []string{"127.0.0.1"}, Port: &port}, &first); err != nil {
		t.Fatal(err)
	}
	if first.Port != port || first.PID == 0 {
		t.Fatalf("ingress %+v", first)
	}
	b := n.create(request())
	through := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", "127.0.0.1:"+itoa(port))
	}}}
	ping := func() error {
		header := credentials()
		return callHost(through, "127.0.0.1", "GET", "/"+b.ID+"/44772/ping", nil, nil, header)
	}
	if err := ping(); err != nil {
		t.Fatalf("through ingress: %v", err)
	}
	status, _ := os.ReadFile("/proc/" + itoa(first.PID) + "/status")
	if !strings.Contains(string(status), "Uid:\t18790") || !strings.Contains(string(status), "CapEff:\t0000000000000000") {
		t.Errorf("ingress does not run as a user of the instance's block without rights:\n%s", status)
	}
	// Killed, it comes back, and nobody who connects is refused meanwhile.
	kill(first.PID)
	if err := ping(); err != nil {
		t.Errorf("after a kill: %v", err)
	}
	// Asked again, sandboxd says where it is.
	var again wire.Ingress
	if err := n.call("PUT", "/ingress", wire.IngressRequest{Hosts: []string{"127.0.0.1"}}, &again); err != nil || again.Port != port || again.PID == first.PID {
		t.Errorf("again %+v, %v", again, err)
	}
	// sandboxd killed: the old ingress goes with it, the next one takes the same port without being told.
	n.kill()
	n.start()
	var next wire.Ingress
	if err := n.call("PUT", "/ingress", wire.IngressRequest{Hosts: []string{"127.0.0.1"}}, &next); err != nil || next.Port != port {
		t.Fatalf("next %+v, %v", next, err)
	}
	waitGone(t, again.PID)
	if err := ping(); err != nil {
		t.Errorf("after sandboxd was killed: %v", err)
	}
	n.delete(b.ID)
	if err := n.call("POST", "/shutdown", wire.ShutdownRequest{When: wire.ShutdownRequestWhenIdle}, nil); err != nil {
		t.Fatal(err)
	}
	if err := n.leaves(); err != nil {
		t.Fatal(err)
	}
	if _, err := net.Dial("tcp", "127.0.0.1:"+itoa(port)); err == nil {
		t.Error("ingress outlives sandboxd")
	}
}

func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func TestVersionSaysWhichStateDirectory(t *testing.T) {
	n := newNode(t)
	var version wire.NodeVersion
	if err := n.call("GET", "/version", nil, &version); err != nil {
		t.Fatal(err)
	}
	var stat syscall.Stat_t
	if err := syscall.Stat(n.state, &stat); err != nil {
		t.Fatal(err)
	}
	if version.StateDir != n.state || version.StateInode == nil || *version.StateInode != int64(stat.Ino) || *version.StateDevice != int64(stat.Dev) {
		t.Errorf("%+v, want %s, inode %d", version, n.state, stat.Ino)
	}
}

// SPDX-License-Identifier: Apache-2.0

package sandboxd_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"opensandbox.io/node/record"
	"opensandbox.io/node/wire"
)

func asNobody(name string, args ...string) (string, error) {
	command := exec.Command(name, args...)
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := command.CombinedOutput()
	return string(out), err
}

func TestKilledAtRest(t *testing.T) {
	n := newNode(t, "--deadline-grace", "100ms")
	r := request("sh", "-c", "echo before; exec sleep infinity")
	r.Deadline = time.Now().Add(time.Hour)
	b := n.create(r)
	dying := n.create(request("sh", "-c", "while ! [ -e /workspace/go ]; do sleep 0.01; done; exit 5"))
	var started []byte
	if err := b.call("POST", "/command", wire.RunCommandRequest{Command: "echo one; while ! [ -e /workspace/go ]; do sleep 0.02; done; echo two", Background: true}, &started); err != nil {
		t.Fatal(err)
	}
	n.kill()

	// Without sandboxd: it answers, its command runs on, and another one ends.
	if err := b.ping(); err != nil {
		t.Fatalf("the sandbox did not survive: %v", err)
	}
	b.out("touch /workspace/go")
	dying.out("touch /workspace/go")
	waitGone(t, *dying.PID)

	n.start()
	got, err := n.get(b.ID)
	if err != nil || got.State != wire.ReportStateRunning || *got.PID != *b.PID || got.Generation != 1 || !got.Deadline.Equal(r.Deadline.Truncate(0)) {
		t.Fatalf("adopted %+v, %v", got, err)
	}
	if end := n.ended(dying.ID); end.End.Reason != wire.NodeEndReasonExited || *end.End.ExitCode != 5 {
		t.Errorf("end that happened meanwhile: %+v", end.End)
	}
	if err := b.ping(); err != nil {
		t.Error(err)
	}
	// Its uid block is still claimed, by the new sandboxd as well: killing pid 1 must not free it too early.
	if out := b.out("echo still here"); out != "still here" {
		t.Errorf("output %q", out)
	}
	// An end after the adoption is seen, and its deadline fires.
	if err := n.call("PUT", "/sandboxes/"+b.ID+"/deadline", wire.DeadlineRequest{Deadline: time.Now()}, nil); err != nil {
		t.Fatal(err)
	}
	if end := n.ended(b.ID); end.End.Reason != wire.NodeEndReasonExpired {
		t.Errorf("end %+v", end.End)
	}
	var text []byte
	if n.call("GET", "/sandboxes/"+b.ID+"/output", nil, &text); string(text) != "before\n" {
		t.Errorf("output %q", text)
	}
	// Ends are on record, too.
	n.kill()
	n.start()
	if end := n.ended(b.ID); end.End.Reason != wire.NodeEndReasonExpired {
		t.Errorf("end after another kill: %+v", end.End)
	}
	n.delete(b.ID)
	n.delete(dying.ID)
	n.checkClean()
}

func TestKilledDuringCreates(t *testing.T) {
	n := newNode(t)
	// At ever later moments of a create, so that each of its steps is hit.
	for i := range 12 {
		var group sync.WaitGroup
		answered := make(chan string, 2)
		for range 2 {
			group.Go(func() {
				var r wire.Report
				if n.call("POST", "/sandboxes", request(), &r) == nil {
					answered <- r.ID
				}
			})
		}
		time.Sleep(time.Duration(i) * 1500 * time.Microsecond) // the moment is the point
		n.kill()
		group.Wait()
		close(answered)
		n.start()
		for id := range answered {
			if r, err := n.get(id); err != nil || r.State != wire.ReportStateRunning {
				t.Errorf("round %d: a sandbox that was answered for is %+v, %v", i, r.State, err)
			}
		}
		// What was not answered for is gone, or running, or known to be lost; in any case it can be deleted.
		var list wire.ReportList
		if err := n.call("GET", "/sandboxes", nil, &list); err != nil {
			t.Fatal(err)
		}
		for _, r := range list.Items {
			n.delete(r.ID)
		}
		n.checkClean()
		if t.Failed() {
			t.Fatalf("in round %d", i)
		}
	}
}

func TestKilledDuringDeletes(t *testing.T) {
	n := newNode(t)
	for i := range 8 {
		stays := n.create(request())
		goes := n.create(request())
		goes.out("mkdir /workspace/d && cd /workspace/d && for i in 1 2 3 4 5 6 7 8 9; do mkdir -p $i/a/b/c; done")
		done := make(chan error, 1)
		go func() { done <- n.call("DELETE", "/sandboxes/"+goes.ID, nil, nil) }()
		time.Sleep(time.Duration(i) * 700 * time.Microsecond)
		n.kill()
		answer := <-done
		n.start()
		if err := stays.ping(); err != nil {
			t.Errorf("round %d: the other one: %v", i, err)
		}
		switch r, err := n.get(goes.ID); {
		case err != nil: // finished by the next one, or before the kill
		case answer == nil:
			t.Errorf("round %d: deleted, yet there: %+v", i, r)
		default:
			n.delete(goes.ID)
		}
		n.delete(stays.ID)
		n.checkClean()
		if t.Failed() {
			t.Fatalf("in round %d", i)
		}
	}
}

func TestTheFirstProcessIsKilled(t *testing.T) {
	n := newNode(t)
	b := n.create(request())
	kill(*b.PID)
	if end := n.ended(b.ID); end.End.Reason != wire.NodeEndReasonLost {
		t.Errorf("end %+v", end.End)
	}
	n.delete(b.ID)
	n.checkClean()
}

func TestAfterARestartOfTheHost(t *testing.T) {
	n := newNode(t)
	b := n.create(request())
	n.kill()
	kill(*b.PID)
	waitGone(t, *b.PID)
	// As a reboot leaves it: the record names another run of the kernel, and a pid that may be anybody's by now.
	path := filepath.Join(n.state, "records", b.ID+".json")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var r record.Record
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	r.BootID, r.PID = "another", os.Getpid()
	text, _ = json.Marshal(r)
	os.WriteFile(path, text, 0o600)
	n.start()
	if end := n.ended(b.ID); end.End.Reason != wire.NodeEndReasonHostRestarted {
		t.Errorf("end %+v", end.End)
	}
	n.delete(b.ID)
	n.checkClean()
}

func TestAPidThatChangedHandsIsNotTouched(t *testing.T) {
	n := newNode(t)
	b := n.create(request())
	n.kill()
	kill(*b.PID)
	waitGone(t, *b.PID)
	bystander := exec.Command("sleep", "60")
	if err := bystander.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { bystander.Process.Kill(); bystander.Wait() }()
	path := filepath.Join(n.state, "records", b.ID+".json")
	text, _ := os.ReadFile(path)
	var r record.Record
	json.Unmarshal(text, &r)
	r.PID = bystander.Process.Pid
	text, _ = json.Marshal(r)
	os.WriteFile(path, text, 0o600)
	n.start()
	if end := n.ended(b.ID); end.End.Reason != wire.NodeEndReasonLost {
		t.Errorf("end %+v", end.End)
	}
	n.delete(b.ID)
	if err := bystander.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the process that has the pid now was killed: %v", err)
	}
	n.checkClean()
}

func TestAStateDirectoryThatIsRemovedTakesEverythingWithIt(t *testing.T) {
	n := newNode(t)
	b := n.create(request())
	if err := os.RemoveAll(n.state); err != nil {
		t.Fatal(err)
	}
	n.call("GET", "/version", nil, nil) // makes it look
	if err := n.leaves(); err != nil {
		t.Fatal(err)
	}
	waitGone(t, *b.PID)
	if _, err := os.Stat(n.run); err == nil {
		t.Error("the run directory is left")
	}
}

func TestStraysAreSwept(t *testing.T) {
	n := newNode(t)
	n.kill()
	id := uuid()
	for _, dir := range []string{"fs/sandboxes/" + id + "/upper", "spool/" + id} {
		os.MkdirAll(filepath.Join(n.state, dir), 0o700)
	}
	os.MkdirAll(filepath.Join(n.run, id), 0o700)
	os.WriteFile(filepath.Join(n.state, "records", id+".end"), nil, 0o600)
	os.WriteFile(filepath.Join(n.blocks, "77"), nil, 0o600)
	for _, tree := range n.cgroups() {
		os.MkdirAll(filepath.Join(tree, "77", "payload"), 0o755)
	}
	n.start()
	n.checkClean()
	if _, err := os.Stat(filepath.Join(n.blocks, "77")); err == nil {
		t.Error("the file of a block that nobody holds is left")
	}
}

// waitGone waits for a process that is nobody's child here.
func waitGone(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		stat, err := os.ReadFile("/proc/" + itoa(pid) + "/stat")
		if err != nil || zombie(string(stat)) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %d lives", pid)
		}
	}
}

func zombie(stat string) bool {
	for i := len(stat) - 1; i >= 0; i-- {
		if stat[i] == ')' {
			return len(stat) > i+2 && (stat[i+2] == 'Z' || stat[i+2] == 'X')
		}
	}
	return true
}

// waitNoInit waits until first processes that were never committed have noticed that sandboxd is gone.
func waitNoInit(t *testing.T, n *node) {
	t.Helper()
	for deadline := time.Now().Add(patience); len(n.initPIDs()) > 0; time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("processes live without a record: %v", n.initPIDs())
		}
	}
}

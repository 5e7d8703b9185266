// SPDX-License-Identifier: Apache-2.0

package sandboxd_test

import (
	"bufio"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"opensandbox.io/node/wire"
)

// door is the way to a node's sandboxes through its ingress.
type door struct {
	*node
	host string
	wire.Ingress
}

func (n *node) ingress(host string, port int) door {
	n.t.Helper()
	d := door{node: n, host: host}
	request := wire.IngressRequest{Hosts: []string{host}}
	if port != 0 {
		request.Port = &port
	}
	if err := n.call("PUT", "/ingress", request, &d.Ingress); err != nil {
		n.t.Fatal(err)
	}
	return d
}

func (d door) ask(id, path string) error {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(d.host, itoa(d.Port)))
	}}}
	return callHost(client, "127.0.0.1", "GET", "/"+id+path, nil, nil, credentials())
}

func TestIngressListensElsewhereWhenAsked(t *testing.T) {
	n := newNode(t)
	port := freePort(t)
	b := n.create(request())
	defer n.delete(b.ID)
	first := n.ingress("127.0.0.1", port)
	if again := n.ingress("127.0.0.1", 0); again.PID != first.PID || again.Port != port {
		t.Errorf("asked for the same, it became %+v", again.Ingress)
	}
	// Another address on the same port, one that the old listener is in the way of.
	everywhere := n.ingress("0.0.0.0", 0)
	if everywhere.Port != port || !slices.Equal(everywhere.Hosts, []string{"0.0.0.0"}) || everywhere.PID == first.PID {
		t.Fatalf("%+v", everywhere.Ingress)
	}
	everywhere.host = "127.0.0.2"
	if err := everywhere.ask(b.ID, "/44772/ping"); err != nil {
		t.Errorf("at another address: %v", err)
	}
	wantCode(t, everywhere.ask(b.ID, "/8080/"), wire.CodeIngressAccessRequired) // it knows that others reach it
	// Another port.
	other := n.ingress("127.0.0.1", freePort(t))
	if err := other.ask(b.ID, "/44772/ping"); err != nil {
		t.Errorf("at another port: %v", err)
	}
	wantCode(t, other.ask(b.ID, "/8081/"), wire.CodeIngressPortClosed)
	if _, err := net.Dial("tcp", "127.0.0.1:"+itoa(port)); err == nil {
		t.Error("it listens at the old port as well")
	}
	// A port that is taken: everything stays as it is.
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	number := taken.Addr().(*net.TCPAddr).Port
	wantCode(t, n.call("PUT", "/ingress", wire.IngressRequest{Hosts: []string{"127.0.0.1"}, Port: &number}, nil), wire.CodeNodeUnavailable)
	// An address that this machine does not have, on the port it has.
	wantCode(t, n.call("PUT", "/ingress", wire.IngressRequest{Hosts: []string{"192.0.2.1"}}, nil), wire.CodeNodeUnavailable)
	if now := n.ingress("127.0.0.1", 0); now.Port != other.Port {
		t.Errorf("it moved to %+v", now.Ingress)
	}
	if err := other.ask(b.ID, "/44772/ping"); err != nil {
		t.Errorf("after failures: %v", err)
	}
}

func TestIngressSaysWhatBecameOfASandbox(t *testing.T) {
	n := newNode(t)
	in := n.ingress("127.0.0.1", freePort(t))
	b := n.create(request("sh", "-c", "until [ -e /tmp/end ]; do sleep 0.05; done; exit 4"))
	b.out("touch /tmp/end")
	n.ended(b.ID)
	told := func() string { return wantCode(t, in.ask(b.ID, "/44772/ping"), wire.CodeIngressSandboxEnded).Message }
	until(t, "the end is told", func() bool {
		_, err := os.Stat(n.run + "/ended/" + b.ID)
		return err == nil
	})
	if message := told(); !strings.Contains(message, "exited with code 4") {
		t.Error(message)
	}
	// Also by the next sandboxd and its ingress.
	n.kill()
	n.start()
	in = n.ingress("127.0.0.1", 0)
	if message := told(); !strings.Contains(message, "exited with code 4") {
		t.Error(message)
	}
	n.delete(b.ID)
	wantCode(t, in.ask(b.ID, "/44772/ping"), wire.CodeIngressSandboxNotFound)
	if entries, err := os.ReadDir(n.run + "/ended"); err != nil || len(entries) > 0 {
		t.Errorf("%v is left, %v", entries, err)
	}
}

// until waits for what nobody tells.
func until(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

func TestLogTellsWhoMadeAndDeletedWhat(t *testing.T) {
	n := newNode(t)
	b := n.create(request())
	n.delete(b.ID)
	// A line is written when its answer is on the way.
	until(t, "the delete is in the log", func() bool { return strings.Contains(n.log(), `"method":"DELETE"`) })
	seen := map[string]bool{}
	lines := bufio.NewScanner(strings.NewReader(n.log()))
	for lines.Scan() {
		var line map[string]any
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatalf("not JSON: %s", lines.Text())
		}
		if line["component"] != "sandboxd" || line["ts"] == nil || line["level"] == nil || line["msg"] == nil {
			t.Errorf("not the shape of a line: %s", lines.Text())
		}
		if line["msg"] == "request" {
			if line["level"] != "info" || line["sandboxId"] != b.ID || line["requestId"] == nil || line["traceId"] == nil {
				t.Errorf("request: %s", lines.Text())
			}
			seen[line["method"].(string)] = true
		}
	}
	if !seen["POST"] || !seen["DELETE"] || len(seen) != 2 {
		t.Errorf("requests in the log: %v", seen)
	}
}

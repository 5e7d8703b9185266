// SPDX-License-Identifier: Apache-2.0

package sandboxd_test

import (
	"context"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"opensandbox.io/node/wire"
)

// Sessions and terminals where they are meant to be: as a confined child of a sandbox's first process, with a devpts
// of the sandbox's own.
func TestShells(t *testing.T) {
	n := newNode(t)
	b := n.create(request("sleep", "1000"))
	var made wire.SessionCreated
	if err := b.call("POST", "/session", wire.CreateSessionRequest{Cwd: "/tmp/made"}, &made); err != nil {
		t.Fatal(err)
	}
	run := func(command string, timeout int64) string {
		t.Helper()
		var text []byte
		body := wire.RunInSessionRequest{Command: command, Timeout: &timeout}
		if err := b.call("POST", "/session/"+made.SessionID+"/run", body, &text); err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	run("f() { echo \"f in $PWD\"; }", 0)
	if got := run("sleep 1000; echo later", 300); !strings.Contains(got, `"timed_out"`) || strings.Contains(got, "later") {
		t.Errorf("timeout: %s", got)
	}
	if got := run("f", 0); !strings.Contains(got, "f in /tmp/made") {
		t.Errorf("the shell did not stay: %s", got)
	}
	// The same walls as around a command.
	confined := "grep -E '^(Seccomp|NoNewPrivs|CapEff):' /proc/self/status | tr -d '\\t\\n'; cat /proc/self/cgroup"
	if want, got := strings.ReplaceAll(b.out(confined), "\n", `\n`), run(confined, 0); !strings.Contains(strings.ReplaceAll(got, "\n", `\n`), strings.Split(want, `\n`)[0]) {
		t.Errorf("confined as %q, not as %q", got, want)
	}

	var terminal wire.SessionCreated
	if err := b.call("POST", "/pty", wire.CreatePtyRequest{}, &terminal); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	conn, _, err := websocket.Dial(ctx, "ws://execd/pty/"+terminal.SessionID+"/ws",
		&websocket.DialOptions{HTTPClient: b.client, HTTPHeader: credentials()})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.CloseNow()
	if err := conn.Write(ctx, websocket.MessageBinary, []byte("\x00tty; ps -o stat= -p $$; exit 6\n")); err != nil {
		t.Fatal(err)
	}
	var seen string
	for {
		_, data, err := conn.Read(ctx)
		if err != nil {
			if websocket.CloseStatus(err) != websocket.StatusNormalClosure {
				t.Errorf("%v after %q", err, seen)
			}
			break
		}
		seen += string(data)
	}
	if !strings.Contains(seen, "/dev/pts/0") || !strings.Contains(seen, `"exit_code":6`) || strings.Contains(seen, "no job control") {
		t.Errorf("terminal: %q", seen)
	}
}

// SPDX-License-Identifier: Apache-2.0

package enter

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// What a sandbox's first process imports, it pays for at every start and carries for its whole life. This is the
// list of our own packages and foreign modules in it; whoever makes it longer should know why.
func TestImports(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".", "../execd").Output()
	if err != nil {
		t.Fatal(err)
	}
	allowed := []string{
		"account", "cgroup", "code", "command", "control", "enter", "envfile", "execd", "file", "forward", "httpproxy", "isolated", "metric", "portproxy", "procmask", "pty", "reply",
		"safefile", "seccomp", "session", "spawn", "thread", "wipe", "wire",
	}
	for path := range strings.FieldsSeq(string(out)) {
		name, ours := strings.CutPrefix(path, "opensandbox.io/node/")
		switch {
		case ours && slices.Contains(allowed, name):
		case strings.HasPrefix(path, "golang.org/x/sys/"), strings.HasPrefix(path, "github.com/coder/websocket"):
		default:
			t.Errorf("%s has come in", path)
		}
	}
	// The host's side: making sandboxes, serving clients, images.
	for _, forbidden := range []string{"launch", "sandboxd", "ingress", "record", "hostimage"} {
		if slices.Contains(allowed, forbidden) {
			t.Errorf("%s has no business inside a sandbox", forbidden)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package isolated

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

func TestEnvironment(t *testing.T) {
	all := []string{"PATH=/bin", "A=1", "GITHUB_TOKEN=x", "db_password=x", "AWS_SECRET_ACCESS_KEY=x", "KEYBOARD=us", "TOKENS=2"}
	for _, one := range []struct {
		strict bool
		wish   *wire.IsolatedEnvironment
		want   string
	}{
		{true, nil, "PATH A KEYBOARD TOKENS"},
		{false, nil, "PATH A GITHUB_TOKEN db_password AWS_SECRET_ACCESS_KEY KEYBOARD TOKENS"},
		{true, &wire.IsolatedEnvironment{Mode: "allow", Keys: []string{"GITHUB_TOKEN"}}, "PATH GITHUB_TOKEN"},
		{true, &wire.IsolatedEnvironment{Mode: "deny", Keys: []string{"A"}}, "PATH KEYBOARD TOKENS"},
		{false, &wire.IsolatedEnvironment{Keys: []string{"A", "PATH"}}, "GITHUB_TOKEN db_password AWS_SECRET_ACCESS_KEY KEYBOARD TOKENS"},
	} {
		p := &plan{strict: one.strict, request: &wire.CreateIsolatedSessionRequest{EnvPassthrough: one.wish}}
		var names []string
		for _, pair := range p.environment(all) {
			name, _, _ := strings.Cut(pair, "=")
			names = append(names, name)
		}
		if got := strings.Join(names, " "); got != one.want {
			t.Errorf("%v %+v: %s, want %s", one.strict, one.wish, got, one.want)
		}
	}
}

func TestPaths(t *testing.T) {
	for path, ok := range map[string]bool{
		"/a": true, "/a/b c": true, "/process": true, "/devil/x": true, "": false, "a": false, "/": false, "/a/": false, "/a/../b": false, "/./a": false,
		"/proc": false, "/proc/1": false, "/sys/x": false, "/dev": false, "/a\x00b": false, "/" + strings.Repeat("x", 4096): false,
	} {
		var fault *reply.Fault
		err := checkPath("path", path)
		if (err == nil) != ok || err != nil && (!errors.As(err, &fault) || fault.Code != wire.CodeInvalidRequestBody) {
			t.Errorf("%.40q: %v", path, err)
		}
	}
}

func TestNames(t *testing.T) {
	for name, ok := range map[string]bool{"A": true, "_a1": true, "a b": false, "1a": false, "": false, "a=b": false, "a;rm": false, "ä": false} {
		if isName(name) != ok {
			t.Errorf("%q", name)
		}
	}
	if got := exports(map[string]string{"A": "it's"}); got != `export A='it'\''s'; ` {
		t.Errorf("%s", got)
	}
}

func TestIDs(t *testing.T) {
	seen := []string{}
	for range 100 {
		id := newID()
		if len(id) != 36 || id[14] != '4' || !strings.ContainsRune("89ab", rune(id[19])) || slices.Contains(seen, id) {
			t.Fatal(id)
		}
		seen = append(seen, id)
	}
}

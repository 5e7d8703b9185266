// SPDX-License-Identifier: Apache-2.0

package file

import (
	"archive/tar"
	"bytes"
	"encoding/base64"
	"os"
	"strings"
	"testing"

	"opensandbox.io/node/wire"
)

func (b *bench) refused(method, route string, pairs []string, body any, want ...string) {
	b.Helper()
	status, _, text := b.call(method, route, q(pairs...), body)
	if status < 400 {
		b.Errorf("%s %s %v: %d", method, route, pairs, status)
	}
	for _, part := range want {
		if !strings.Contains(text, part) {
			b.Errorf("%s %s: %s does not say %q", method, route, text, part)
		}
	}
}

// A body that lacks what the contract requires must not be taken for one that says "nothing": it would delete text.
func TestMissingFieldsAreNotEmptyOnes(t *testing.T) {
	b := newBench(t)
	p := b.put("r", "hello")
	b.refused("POST", "/files/replace", nil, map[string]map[string]string{p: {"old": "ell"}}, "INVALID_REQUEST_BODY", "new", "missing")
	if b.get("r") != "hello" {
		t.Errorf("it is %q", b.get("r"))
	}
	b.refused("POST", "/files/mv", nil, []map[string]string{{"src": p}}, "INVALID_REQUEST_BODY", "dest", "missing")
	if status, _, _ := b.call("POST", "/files/replace", nil, map[string]wire.Replacement{p: {Old: "ell", New: ""}}); status != 200 || b.get("r") != "ho" {
		t.Errorf("%d, %q", status, b.get("r"))
	}
}

// What was done before the entry that failed stays done, so the answer has to say so.
func TestHalfDoneBatchesSayHowFar(t *testing.T) {
	b := newBench(t)
	for _, name := range []string{"a", "b", "z/in"} {
		b.put(name, "old")
	}
	const two = "2 before it are done ("
	b.refused("POST", "/files/replace", nil,
		map[string]wire.Replacement{b.path("a"): {Old: "old", New: "n"}, b.path("b"): {Old: "old", New: "n"}, b.path("c"): {Old: "o", New: "n"}, b.path("z/in"): {Old: "old", New: "n"}},
		two, b.path("a")+", "+b.path("b"))
	if b.get("a") != "n" || b.get("z/in") != "old" {
		t.Errorf("%q %q", b.get("a"), b.get("z/in"))
	}
	b.refused("POST", "/files/mv", nil,
		[]wire.Move{{Src: b.path("a"), Dest: b.path("a2")}, {Src: b.path("b"), Dest: b.path("b2")}, {Src: b.path("none"), Dest: b.path("x")}}, two)
	b.refused("POST", "/files/permissions", nil, map[string]wire.Permission{b.path("a2"): {Mode: 600}, b.path("b2"): {Mode: 600}, b.path("none"): {Mode: 600}}, two)
	b.refused("POST", "/directories", nil, map[string]wire.Permission{b.path("d1"): {}, b.path("d2"): {}, b.path("z/in/d"): {}}, two)
	b.refused("DELETE", "/files", []string{"path", b.path("a2"), "path", b.path("b2"), "path", b.path("z")}, nil, two)
	b.refused("DELETE", "/directories", []string{"path", b.path("d1"), "path", b.path("d2"), "path", "/"}, nil, two)
	// Nothing before it: nothing to say.
	if _, _, text := b.call("DELETE", "/files", q("path", b.path("z")), nil); strings.Contains(text, "before it") {
		t.Error(text)
	}
	body := strings.ReplaceAll(`--x
Content-Disposition: form-data; name="metadata"

{"path":"`+b.path("up")+`"}
--x
Content-Disposition: form-data; name="file"; filename="f"

text
--x
Content-Disposition: form-data; name="metadata"

{"path":"`+b.path("z")+`"}
--x
Content-Disposition: form-data; name="file"; filename="f"

text
--x--
`, "\n", "\r\n")
	status, _, text := b.call("POST", "/files/upload", nil, strings.NewReader(body), "Content-Type", "multipart/form-data; boundary=x")
	if status != 400 || !strings.Contains(text, "1 before it are done ("+b.path("up")+")") || b.get("up") != "text" {
		t.Errorf("%d %s", status, text)
	}
}

// Only the two blocks of zeros tell a whole archive from one that was cut between two entries.
func TestCutArchivesAreNotWhole(t *testing.T) {
	b := newBench(t)
	data := archive(t, regular("one", "1"), regular("zeros", strings.Repeat("\x00", 2048)))
	end := len(data) - 1024 // of the entries
	for name, cut := range map[string][]byte{
		"nothing": {}, "one entry": data[:1024], "all but the end": data[:end], "half of the end": data[:end+512],
		"zipped": zipped(data[:end]), "a header for the next": append(append([]byte{}, data[:end]...), archive(t, item{tar.Header{
			Typeflag: tar.TypeReg, Name: strings.Repeat("long/", 60) + "x", PAXRecords: map[string]string{"comment": "x"}, Format: tar.FormatPAX}, ""})[:1024]...),
	} {
		status, body := b.unpack("t", cut)
		if status != 400 || !strings.Contains(body, "ends early") || !strings.Contains(body, "xtracted") {
			t.Errorf("%s: %d %s", name, status, body)
		}
	}
	if b.get("t/one") != "1" {
		t.Error("what came before is not there")
	}
	for name, whole := range map[string][]byte{
		"plain": data, "zipped": zipped(data), "padded": append(bytes.Clone(data), make([]byte, 8192)...), "empty": make([]byte, 1024),
	} {
		if status, body := b.unpack("t", whole); status != 200 {
			t.Errorf("%s: %d %s", name, status, body)
		}
	}
}

func TestDigestsThatCannotBeCheckedAreRefused(t *testing.T) {
	b := newBench(t)
	zeros := base64.StdEncoding.EncodeToString(make([]byte, 64))
	for _, header := range []string{"junk", "sha-512=:" + zeros + ":", "sha-256", "=::", "junk, sha-256=:" + zeros[:43] + "=:"} {
		status, _, body := b.call("PUT", "/files/content", q("path", b.path("f")), strings.NewReader("x"), "Content-Digest", header)
		if status != 400 || !strings.Contains(body, "Content-Digest") {
			t.Errorf("%s: %d %s", header, status, body)
		}
	}
	if got := b.entries(); len(got) != 0 {
		t.Errorf("there is %q", got)
	}
}

// After a failed check of the whole the parts are gone, and the client has to know.
func TestFailedCheckOfPartsSaysToBeginAnew(t *testing.T) {
	b := newBench(t)
	b.content("f", "one", "offset", "0")
	status, _, body := b.call("PUT", "/files/content", q("path", b.path("f"), "offset", "3", "final", "true"), strings.NewReader("two"), "X-Checksum-SHA256", digest("other"))
	if status != 400 || !strings.Contains(body, "begin anew with offset=0") || b.arrived("f") != "0" {
		t.Errorf("%d %s, %s", status, body, b.arrived("f"))
	}
	b.content("f", "one", "offset", "0")
	status, _, body = b.call("PUT", "/files/content", q("path", b.path("f"), "offset", "3"), strings.NewReader("two"), "X-Checksum-SHA256", digest("other"))
	if status != 400 || !strings.Contains(body, "those before it stay") || b.arrived("f") != "3" {
		t.Errorf("%d %s, %s", status, body, b.arrived("f"))
	}
}

func TestSearchRefusesProcLikeTheOthers(t *testing.T) {
	b := newBench(t)
	b.refused("GET", "/files/search", []string{"path", "/proc"}, nil, "NOT_SUPPORTED", "lies in /proc")
}

func TestModesAreOctalDigits(t *testing.T) {
	b := newBench(t)
	for _, mode := range []string{"648", "9", "17777", "-1", "0x1ff"} {
		b.refused("PUT", "/files/content", []string{"path", b.path("f"), "mode", mode}, strings.NewReader("x"), "mode")
	}
	if status, _, _, body := b.content("f", "x", "mode", "420"); status != 200 {
		t.Errorf("%d %s", status, body)
	}
}

// Our own writes exchange the file. Who watches sees new contents, not a new file, and nothing of the hidden ones.
func TestWatchSeesOurWritesAsWrites(t *testing.T) {
	b := newBench(t)
	b.do(os.Mkdir(b.path("w"), 0o755))
	s := b.watch("", b.path("w"), false)
	end := func() { b.do(os.WriteFile(b.path("w/end"), nil, 0o644), os.Remove(b.path("w/end"))) }
	b.content("w/f", "new")
	b.content("w/f", "over")
	end()
	s.expect("create w/f", "modify w/f", "create w/end", "delete w/end")
	b.content("w/f", "in ", "offset", "0")
	b.content("w/f", "parts", "offset", "3", "final", "true")
	b.content("w/g", "in parts", "offset", "0", "final", "true")
	end()
	s.expect("modify w/f", "create w/g", "create w/end", "delete w/end")
	if status, body := b.unpack("w", archive(t, regular("f", "tar"), regular("h", "tar"), entry(tar.TypeSymlink, "g", "f"))); status != 200 {
		t.Fatal(body)
	}
	end()
	s.expect("modify w/f", "create w/h", "modify w/g", "create w/end", "delete w/end")
	one := b.watch("", b.path("w/f"), false)
	b.content("w/f", "again")
	b.do(os.Remove(b.path("w/f")))
	one.expect("modify w/f", "delete w/f")
}

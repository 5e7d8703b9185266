// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func pair(t *testing.T) (*Conn, *Conn) {
	t.Helper()
	ours, file, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Dup(int(file.Fd())) // as a child would have it: a number of its own
	if err != nil {
		t.Fatal(err)
	}
	file.Close()
	theirs, err := Inherited(fd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.Close(); theirs.Close() })
	return ours, theirs
}

func TestFilesTravelWithAMessageLargerThanTheSocketBuffer(t *testing.T) {
	ours, theirs := pair(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	big := strings.Repeat("x", 3<<20)
	sent := make(chan error, 1)
	go func() {
		sent <- ours.Send(Room{Profile: "a", Own: []string{big}, Files: []string{FileLog}}, w)
		w.Close()
	}()
	var got Room
	files, err := theirs.Receive(&got)
	if err != nil {
		t.Fatal(err)
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if len(files) != 1 || got.Profile != "a" || got.Own[0] != big {
		t.Fatalf("got %d files, profile %q", len(files), got.Profile)
	}
	if _, err := files[0].WriteString("hello"); err != nil {
		t.Fatal(err)
	}
	files[0].Close()
	text, _ := io.ReadAll(r)
	if string(text) != "hello" {
		t.Fatalf("read %q through the passed file", text)
	}
}

func TestEndOfStreamIsEOF(t *testing.T) {
	ours, theirs := pair(t)
	ours.Close()
	var order Commit
	if _, err := theirs.Receive(&order); !errors.Is(err, io.EOF) {
		t.Fatalf("got %v", err)
	}
}

func TestAFrameThatIsTooLargeIsRefused(t *testing.T) {
	ours, theirs := pair(t)
	if _, err := ours.sock.Write([]byte{0xff, 0, 0, 0}); err != nil {
		t.Fatal(err)
	}
	var order Commit
	if _, err := theirs.Receive(&order); err == nil {
		t.Fatal("accepted")
	}
}

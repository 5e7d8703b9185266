// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bufio"
	"errors"
	"io"
	"mime/multipart"
	"net/http"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

const metadataMax = 64 << 10

// upload writes files as they arrive: pairs of a `metadata` and a `file` part, the n-th of one belonging to the n-th
// of the other. The part's own file name is the client's and means nothing.
func (a *API) upload(w http.ResponseWriter, r *http.Request) error {
	// The multipart reader takes small bites; a large buffer in between saves system calls.
	r.Body = struct {
		io.Reader
		io.Closer
	}{bufio.NewReaderSize(r.Body, bufferSize), r.Body}
	parts, err := r.MultipartReader()
	if err != nil {
		return reply.Errorf(wire.CodeInvalidFile, "The body is not multipart/form-data: %v.", err)
	}
	written, err := a.receiveAll(parts)
	if err != nil {
		return partway(err, written)
	}
	return done(w)
}

// receiveAll writes the files of the parts, and says which also when it fails.
func (a *API) receiveAll(parts *multipart.Reader) (written []string, err error) {
	var waiting []wire.UploadMetadata
	for {
		part, err := parts.NextRawPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return written, reply.Errorf(wire.CodeInvalidFileContent, "The body ends early: %v.", err)
		}
		switch part.FormName() {
		case "metadata":
			m, err := metadata(part)
			if err != nil {
				return written, err
			}
			if waiting = append(waiting, m); len(waiting) > 1000 {
				return written, reply.Errorf(wire.CodeInvalidFile, "More than 1000 metadata parts without their files.")
			}
		case "file":
			if len(waiting) == 0 {
				return written, reply.Errorf(wire.CodeInvalidFile, "File part %d comes without its metadata part before it.", len(written)+1)
			}
			if err := a.receive(waiting[0], part); err != nil {
				return written, err
			}
			written = append(written, waiting[0].Path)
			waiting = waiting[1:]
		default:
			return written, reply.Errorf(wire.CodeInvalidFile, "Unknown part %q.", part.FormName())
		}
	}
	if len(waiting) > 0 {
		return written, reply.Errorf(wire.CodeInvalidFile, "%d metadata parts have no file part.", len(waiting))
	}
	if len(written) == 0 {
		return written, reply.Errorf(wire.CodeInvalidFile, "There is no file in the body.")
	}
	return written, nil
}

func metadata(part *multipart.Part) (m wire.UploadMetadata, err error) {
	limited := &io.LimitedReader{R: part, N: metadataMax}
	if fault := reply.DecodeReader(limited, &m, wire.CodeInvalidFileMetadata); fault != nil {
		if limited.N == 0 {
			fault.Message = "A metadata part is too large."
		}
		return m, fault
	}
	if m.Path == "" {
		return m, reply.Errorf(wire.CodeInvalidFileMetadata, "metadata has no path.")
	}
	return m, nil
}

// receive writes one file.
func (a *API) receive(m wire.UploadMetadata, body io.Reader) error {
	want, err := wanted(wire.Permission{Mode: m.Mode, Owner: m.Owner, Group: m.Group}, wire.CodeInvalidFileMetadata)
	if err != nil {
		return err
	}
	p, err := a.locate(m.Path, true)
	if err != nil {
		return err
	}
	defer p.Close()
	err = p.write(want, false, func(out io.Writer) (bool, error) {
		_, err := io.Copy(out, readFrom{body})
		return true, err
	})
	var broken *readError
	if errors.As(err, &broken) {
		return reply.Errorf(wire.CodeInvalidFileContent, "%s: the body ends early: %v.", m.Path, broken.err)
	}
	if err != nil {
		return explain(m.Path, err)
	}
	return nil
}

// readFrom marks errors of the client's side, so that they are not taken for the disk's.
type readFrom struct{ io.Reader }

type readError struct{ err error }

func (e *readError) Error() string { return e.err.Error() }

func (r readFrom) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if err != nil && err != io.EOF {
		err = &readError{err}
	}
	return n, err
}

// SPDX-License-Identifier: Apache-2.0

// Command fileserver is the floor of file figures: net/http and a directory, nothing else.
//
//	fileserver DIRECTORY    prints host:port; GET and PUT of /files/NAME, GET /ping
package main

import (
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: fileserver DIRECTORY")
	}
	directory := os.Args[1]
	http.HandleFunc("GET /ping", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "ok")
	})
	http.HandleFunc("GET /files/{name}", func(w http.ResponseWriter, r *http.Request) {
		http.ServeFile(w, r, filepath.Join(directory, filepath.Base(r.PathValue("name"))))
	})
	http.HandleFunc("PUT /files/{name}", func(w http.ResponseWriter, r *http.Request) {
		if err := keep(filepath.Join(directory, filepath.Base(r.PathValue("name"))), r.Body); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr())
	log.Fatal(http.Serve(listener, nil))
}

func keep(path string, body io.Reader) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	if _, err := io.Copy(file, body); err != nil {
		file.Close()
		return err
	}
	return file.Close()
}

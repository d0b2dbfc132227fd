// Package fill lets containers use an EROFS layer before all of the layer's blob is present.
//
// # Contract
//
// The data file of a layer (image/layer) is sparse at first. An index of the blob (image/blobindex)
// says which part of the blob has which part of the file. The Engine fills the file: in the
// background, and at once where a process reads. A reader of a missing range waits. It gets the
// right bytes, or EIO after the configured time. It never gets other bytes. The Engine verifies
// every byte of the blob before it is decompressed (but see "Tables of contents"). At the end it
// verifies the digest of the whole tar. Then the layer is like any other.
//
// An index has one of two sources. This node has made it while it unpacked the whole blob. Or it
// was made from a table of contents whose digest is in the image's manifest. Other nodes are not
// asked for indexes.
//
// The kernel reports each read of a missing range by a fanotify event (FAN_PRE_ACCESS), and
// continues the read after the answer. If the file has no fanotify mark, holes read as zeros. So
// three rules keep zeros away from readers:
//
//   - The mark is set before the file is mounted, and removed after the file is complete.
//   - The mark lives as long as a descriptor of the fanotify group. The daemon has one, and so has
//     the monitor of each container on an incomplete layer (Engine.Keep). So it outlives the
//     daemon.
//   - An incomplete file has an extended attribute. If the Engine does not know the layer of such a
//     file, it denies the file's events.
//
// # Order
//
// Spans that readers wait for come first. Then come the rest of the file that was read last, and
// the spans that the caller expects to be needed (Prefer). Other spans share the network with the
// readers, so they wait until no reader has waited for a moment. The tar is hashed from its
// beginning meanwhile.
//
// # Tables of contents
//
// An index of chunks (package blobindex) is made from the table of contents of a blob. The
// manifest's digest covers the table, but nothing shows yet that the table describes the tar. Bytes
// of the blob are verified after decompression, by the digests of the chunks. If the index is
// sealed, they are verified before decompression. All bytes are also kept in BlobFile. When all
// spans are filled, the Engine verifies the digest of the blob, and fetches the blob again if the
// digest is wrong. Then it calls Prove with the blob. Prove compares the tar in the blob with the
// layer's files. If the table is false, or if Prove cannot finish in Config.Proofs attempts, the
// layer ends with DataLoss. The caller then kills the containers on it.
//
// # Takeover
//
// Events are read into a ring, a memory file that the monitors also hold open. The ring says which
// events the daemon has read but not answered. The next daemon takes the group and the ring from a
// monitor (pidfd_getfd). It fills the ranges of these events and then answers them. An answer names
// an event by the descriptor number that the event had in the dead daemon. Until the answer, the
// number is occupied in the new process, so that no new event can get it (see takeover.go).
//
// If no process has kept the group, Engine.TookOver is false. Then earlier mounts of incomplete
// layers show zeros, and the caller kills the containers on them.
//
// # Durability
//
// The file "filled" has a bit for each span of the index. A bit is written after its data is on
// stable storage. Spans without a bit are filled again after a crash, with the same bytes.
//
// # Threads
//
// Fetching, decompressing and writing never wait for the goroutine that reads events, nor for a
// lock that it holds. So the daemon may read files of incomplete layers anywhere else.
package fill

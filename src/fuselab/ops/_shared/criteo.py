"""The numbers of rows of Criteo's tables: the sizes at which operators on ids are timed."""

# Distinct ids per categorical column of the Kaggle challenge's train.txt (45,840,617 rows).
KAGGLE_CARDINALITIES = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194,
    27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip

# Numbers of samples of 26 ids: a single one, then as many as read and write 64 kB to 200 MB.
CPU_ROWS = (
    *(1, 157, 501, 1024, 2048, 5001, 10007),
    *(24001, 65536, 100_003, 160_001, 240_001, 480_000),
)
